"""Paged attention in C: keys and values are read from the cache where they lie, once for all
query heads that share them, with an online softmax in float32."""

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cardan.core.interfaces.attention import (
    AttentionBackend,
    AttentionNeed,
    BatchView,
    KVLayout,
    LayerParams,
)
from cardan.core.interfaces.capabilities import DeviceInfo, Verdict
from cardan.core.interfaces.device import Device
from cardan.core.interfaces.errors import UnsupportedError
from cardan.core.interfaces.torch_attention import refusals
from cardan.core.types.kv import KVCacheSpec
from cardan.platforms.cpu.native.library import (
    NativeFunction,
    NativeLibrary,
    Pointer,
    Real,
    Size,
    check,
    library,
    unavailable_reason,
)

# Codes of the element types in C (simd.h).
_TYPES = {"float32": 0, "bfloat16": 1, "float16": 2}
_BAD_BLOCK, _BAD_ROWS, _NO_ROOM = 2, 3, 4
# Bytes of one item and of one merge (attention.h).
_ITEM_BYTES, _MERGE_BYTES = 32, 16
_ORDER = (0, 1, 2, 3, 4)


class _Plan(ctypes.Structure):
    """``struct attention_plan`` of attention.h."""

    _fields_ = [
        ("num_rows", ctypes.c_int64),
        ("num_tokens", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("k_dim", ctypes.c_int64),
        ("v_dim", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("type", ctypes.c_int64),
        ("threads", ctypes.c_int64),
        ("query_start", ctypes.c_void_p),
        ("seq_lens", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("block_table", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("table_width", ctypes.c_int64),
        ("items", ctypes.c_void_p),
        ("merges", ctypes.c_void_p),
        ("partials", ctypes.c_void_p),
        ("item_room", ctypes.c_int64),
        ("merge_room", ctypes.c_int64),
        ("num_items", ctypes.c_int64),
        ("num_merges", ctypes.c_int64),
        ("num_partials", ctypes.c_int64),
        ("cost", ctypes.c_int64),
        ("partial_floats", ctypes.c_int64),
    ]


@dataclass(slots=True)
class NativePlan:
    """One step. ``kept`` owns the memory that ``fields`` points to; ``address`` is that of
    ``fields``. Items are cut when the first layer runs, which brings the number of heads."""

    fields: _Plan
    address: int
    kept: list[Tensor | npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class _Functions:
    cut: NativeFunction
    run: NativeFunction
    write: NativeFunction


def bind(lib: NativeLibrary) -> _Functions:
    """The functions of ``attention.c`` in ``lib``."""
    q = (Pointer, Size, Size)
    layer = (Pointer, Size, Pointer, Pointer, Pointer, Pointer, Size, Real, Real)
    return _Functions(
        cut=lib.function("cardan_attention_cut", Pointer),
        run=lib.function("cardan_attention_run", Pointer, *q, *layer),
        write=lib.function("cardan_attention_write", Pointer, *q, *q, Pointer, Size),
    )


@cache
def _functions() -> _Functions:
    return bind(library())


class NativeAttention(AttentionBackend):
    """Multi-head, grouped and multi-query attention with all that ``LayerParams`` offers but
    scales of a quantised cache. Equal rows give equal bits in any batch, with any threads."""

    name = "cpu.native"

    @classmethod
    def accepts(cls, need: AttentionNeed, device: DeviceInfo) -> Verdict:
        reasons = list(refusals(need))
        if need.dtype not in _TYPES:
            reasons.append(f"dtype {need.dtype} is not among {', '.join(_TYPES)}")
        if not reasons:
            missing = unavailable_reason()
            reasons += [] if missing is None else [missing]
        return Verdict(tuple(reasons))

    @classmethod
    def layout(cls, spec: KVCacheSpec, device: DeviceInfo) -> KVLayout:
        """``[block, 2, head, token in block, max(k_head_dim, v_head_dim)]``: what a head reads of
        a block lies together."""
        return KVLayout(order=_ORDER)

    def __init__(self, spec: KVCacheSpec, layout: KVLayout, device: Device) -> None:
        if layout.order != _ORDER or layout.opaque:
            raise UnsupportedError(f"{self.name} attention reads only its own cache layout")
        self._functions = _functions()
        self._dtype: torch.dtype = getattr(torch, spec.dtype)
        self._k_shape = (spec.num_kv_heads, spec.k_head_dim)
        self._v_shape = (spec.num_kv_heads, spec.v_head_dim)
        self._v_dim = spec.v_head_dim
        self._cache_shape = (
            2,
            spec.num_kv_heads,
            spec.block_size,
            max(spec.k_head_dim, spec.v_head_dim),
        )
        self._template = _Plan(
            num_kv_heads=spec.num_kv_heads,
            k_dim=spec.k_head_dim,
            v_dim=spec.v_head_dim,
            block_size=spec.block_size,
            type=_TYPES[spec.dtype],
        )

    def plan(self, batch: BatchView) -> NativePlan:
        unknown = batch.features - self.features
        if unknown:
            raise UnsupportedError(
                f"{self.name} attention cannot honour {', '.join(sorted(unknown))}"
            )
        fields = _Plan.from_buffer_copy(self._template)
        starts = _packed(batch.query_start_loc, torch.int64, "query_start_loc")
        lens = _packed(batch.seq_lens, torch.int64, "seq_lens")
        slots = _packed(batch.slot_mapping, torch.int64, "slot_mapping")
        table = batch.block_table
        if table.dtype is not torch.int32:
            raise ValueError(f"block_table must be int32, got {table.dtype}")
        if table.stride(1) != 1:
            table = table.contiguous()
        fields.num_rows = batch.num_rows
        fields.num_tokens = batch.num_tokens
        fields.threads = torch.get_num_threads()
        fields.query_start = starts.data_ptr()
        fields.seq_lens = lens.data_ptr()
        fields.slots = slots.data_ptr()
        fields.block_table = table.data_ptr()
        fields.table_stride = table.stride(0)
        fields.table_width = table.shape[1]
        return NativePlan(fields, ctypes.addressof(fields), [starts, lens, slots, table])

    def write(self, k: Tensor, v: Tensor, cache: Tensor, plan: NativePlan) -> None:
        k, v = self._elements(k, "k"), self._elements(v, "v")
        tokens = plan.fields.num_tokens
        if k.shape != (tokens, *self._k_shape) or v.shape != (tokens, *self._v_shape):
            raise ValueError(
                f"k {tuple(k.shape)} and v {tuple(v.shape)} must be "
                f"{(tokens, *self._k_shape)} and {(tokens, *self._v_shape)}"
            )
        num_blocks = self._num_blocks(cache)
        k_strides, v_strides = k.stride(), v.stride()
        status = self._functions.write(
            plan.address,
            k.data_ptr(),
            k_strides[0],
            k_strides[1],
            v.data_ptr(),
            v_strides[0],
            v_strides[1],
            cache.data_ptr(),
            num_blocks,
        )
        if status:
            _raise(status, num_blocks)

    def run(
        self,
        q: Tensor,
        cache: Tensor,
        plan: NativePlan,
        layer: LayerParams,
        lse: Tensor | None = None,
    ) -> Tensor:
        if layer.k_scale is not None or layer.v_scale is not None:
            raise UnsupportedError(f"{self.name} attention reads no scaled (quantised) cache")
        q = self._elements(q, "q")
        tokens, num_heads, _ = q.shape
        if plan.fields.num_heads != num_heads:
            self._cut(plan, num_heads)
        if tokens != plan.fields.num_tokens or q.shape[2] != self._k_shape[1]:
            raise ValueError(
                f"q {tuple(q.shape)} must be "
                f"({plan.fields.num_tokens}, num_heads, {self._k_shape[1]})"
            )
        num_blocks = self._num_blocks(cache)
        sinks = _per_head(layer.sinks, num_heads, "sinks")
        slopes = _per_head(layer.alibi_slopes, num_heads, "alibi_slopes")
        sums = lse
        if lse is not None and (lse.dtype is not torch.float32 or not lse.is_contiguous()):
            sums = torch.empty_like(
                lse, dtype=torch.float32, memory_format=torch.contiguous_format
            ).copy_(lse)
        out = torch.empty((tokens, num_heads, self._v_dim), dtype=self._dtype)
        strides = q.stride()
        status = self._functions.run(
            plan.address,
            q.data_ptr(),
            strides[0],
            strides[1],
            cache.data_ptr(),
            num_blocks,
            out.data_ptr(),
            0 if sums is None else sums.data_ptr(),
            0 if sinks is None else sinks.data_ptr(),
            0 if slopes is None else slopes.data_ptr(),
            layer.window or 0,
            layer.scale,
            layer.softcap or 0.0,
        )
        if status:
            _raise(status, num_blocks)
        if lse is not None and sums is not None and sums is not lse:
            lse.copy_(sums)
        return out

    def _cut(self, plan: NativePlan, num_heads: int) -> None:
        """Cut the step into items for ``num_heads`` query heads."""
        fields = plan.fields
        if num_heads % fields.num_kv_heads:
            raise ValueError(
                f"{num_heads} query heads are no multiple of {fields.num_kv_heads} key heads"
            )
        fields.num_heads = num_heads
        room = fields.num_rows, 0
        status = _NO_ROOM
        while status == _NO_ROOM:
            items = np.empty(room[0] * _ITEM_BYTES, np.uint8)
            merges = np.empty(room[1] * _MERGE_BYTES, np.uint8)
            fields.items, fields.merges = items.ctypes.data, merges.ctypes.data
            fields.item_room, fields.merge_room = room
            status = self._functions.cut(plan.address)
            room = fields.num_items, fields.num_merges
        if status:
            fields.num_heads = 0
            _raise(status, 0)
        plan.kept += [items, merges]
        if fields.num_partials:
            size = fields.num_partials * fields.partial_floats
            partials = np.empty(size, np.float32)
            fields.partials = partials.ctypes.data
            plan.kept.append(partials)

    def _elements(self, tensor: Tensor, name: str) -> Tensor:
        """``tensor`` in the cache's dtype, the elements of a head one after the other."""
        if tensor.dtype is not self._dtype:
            raise ValueError(f"{name} must be {self._dtype} as the cache, got {tensor.dtype}")
        return tensor if tensor.stride(-1) == 1 else tensor.contiguous()

    def _num_blocks(self, cache: Tensor) -> int:
        shape = cache.shape
        if (
            shape[1:] != self._cache_shape
            or cache.dtype is not self._dtype
            or not cache.is_contiguous()
        ):
            raise ValueError(
                f"the cache must be contiguous {self._dtype} (blocks, "
                f"{', '.join(map(str, self._cache_shape))}), got {cache.dtype} {tuple(shape)}"
            )
        return shape[0]


def _packed(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    if tensor.dtype is not dtype:
        raise ValueError(f"{name} must be {dtype}, got {tensor.dtype}")
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def _per_head(values: Tensor | None, num_heads: int, name: str) -> Tensor | None:
    if values is None:
        return None
    if values.numel() != num_heads:
        raise ValueError(f"{name} has {values.numel()} elements for {num_heads} heads")
    return values.to(torch.float32).contiguous()


def _raise(status: int, num_blocks: int) -> None:
    if status == _BAD_BLOCK:
        raise IndexError(
            f"the block table or slot mapping names a block beyond the {num_blocks} of the cache"
        )
    if status == _BAD_ROWS:
        raise ValueError(
            "query_start_loc must ascend from 0 to at most the number of tokens, and seq_lens lie "
            "between a row's query tokens and what its blocks hold"
        )
    check(status)
