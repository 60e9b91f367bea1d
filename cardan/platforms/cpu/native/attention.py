"""Paged attention in C: keys and values are read from the cache where they lie, once for all
query heads that share them, with an online softmax in float32."""

import ctypes
from dataclasses import dataclass, replace
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
    HeadRotation,
    KVLayout,
    LayerParams,
)
from cardan.core.interfaces.capabilities import DeviceInfo, Verdict
from cardan.core.interfaces.device import Device
from cardan.core.interfaces.torch_attention import refusals
from cardan.core.types.kv import DTYPE_BYTES, KVCacheSpec
from cardan.platforms.cpu.native.elementwise_providers import ROTATIONS
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
from cardan.platforms.cpu.native.rotation import (
    ROTATION_FIELDS,
    HeadNorm,
    RotationCall,
    position_beyond,
)
from cardan.platforms.cpu.native.tensors import ELEMENT_TYPES
from cardan.platforms.cpu.paged_cache import ORDER, PagedCache, beyond, packed, per_head

# Codes of the element types of caches in C (attention.h).
_KV_TYPES = {"float32": 0, "bfloat16": 1, "float16": 2, "int8": 3}
_BAD_BLOCK, _BAD_ROWS, _BAD_POSITION = 2, 3, 5
# Bytes of one item, items of a row of few query tokens at most, and keys of each at least
# (attention.h).
_ITEM_BYTES, _MOST_SPLITS, _SPLIT_KEYS = 40, 16, 256
# Plans that are kept for steps at the same addresses.
_MOST_PLANS = 64


class _Plan(ctypes.Structure):
    """``struct attention_plan`` of attention.h."""

    _fields_ = [
        ("num_rows", ctypes.c_int64),
        ("num_tokens", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("k_dim", ctypes.c_int64),
        ("v_dim", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("kv_type", ctypes.c_int64),
        ("content_bytes", ctypes.c_int64),
        ("threads", ctypes.c_int64),
        ("query_start", ctypes.c_void_p),
        ("seq_lens", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("block_table", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("table_width", ctypes.c_int64),
        ("items", ctypes.c_void_p),
        ("item_room", ctypes.c_int64),
        ("seen", ctypes.c_void_p),
        ("num_heads", ctypes.c_int64),
        ("num_items", ctypes.c_int64),
        ("num_partials", ctypes.c_int64),
        ("partial_lines", ctypes.c_int64),
        ("cost", ctypes.c_int64),
    ]


@dataclass(frozen=True, slots=True)
class NativePlan:
    """Steps whose tensors lie at the same addresses.

    Nothing of a step's contents is in it: kernels read them where they lie each time that they
    run, so calls with a plan may be recorded and made again for later steps. ``kept`` owns the
    memory that ``fields`` points to; ``address`` is that of ``fields``.
    """

    fields: _Plan
    address: int
    num_tokens: int
    kept: tuple[Tensor | npt.NDArray[Any], ...]


@dataclass(frozen=True, slots=True)
class _Functions:
    run: NativeFunction
    write: NativeFunction
    rotate_and_write: NativeFunction


def bind(lib: NativeLibrary) -> _Functions:
    """The functions of ``attention.c`` and ``attention_write.c`` in ``lib``."""
    q = (Pointer, Size, Size)
    layer = (Pointer, Size, Pointer, Pointer, Pointer, Pointer, Size, Real, Real)
    return _Functions(
        run=lib.function("cardan_attention_run", Pointer, Size, Size, *q, *layer),
        write=lib.function("cardan_attention_write", Pointer, Size, *q, *q, Pointer, Size),
        rotate_and_write=lib.function(
            "cardan_rotate_and_write", Pointer, *q, Pointer, Size, *ROTATION_FIELDS
        ),
    )


@cache
def _functions() -> _Functions:
    return bind(library())


class NativeAttention(AttentionBackend):
    """Multi-head, grouped and multi-query attention with all that ``LayerParams`` offers but
    scales of a layer. Equal rows give equal bits in any batch, with any threads."""

    name = "cpu.native"

    @classmethod
    def accepts(cls, need: AttentionNeed, device: DeviceInfo) -> Verdict:
        # Calls with a plan may be recorded; all else is as for backends over torch.
        reasons = list(refusals(replace(need, captured=False)))
        names = [str(dtype).removeprefix("torch.") for dtype in ELEMENT_TYPES]
        if need.dtype not in names:
            reasons.append(f"dtype {need.dtype} is not among {', '.join(names)}")
        if not reasons:
            missing = unavailable_reason()
            reasons += [] if missing is None else [missing]
        return Verdict(tuple(reasons))

    @classmethod
    def layout(cls, spec: KVCacheSpec, device: DeviceInfo) -> KVLayout:
        return KVLayout(order=ORDER)

    def __init__(self, spec: KVCacheSpec, layout: KVLayout, device: Device) -> None:
        self._cache = PagedCache.of(self.name, spec, layout)
        self._functions = _functions()
        self._v_dim = spec.v_head_dim
        self._template = _Plan(
            num_kv_heads=spec.num_kv_heads,
            k_dim=spec.k_head_dim,
            v_dim=spec.v_head_dim,
            block_size=spec.block_size,
            kv_type=_KV_TYPES[spec.dtype],
            content_bytes=spec.content_size * DTYPE_BYTES[spec.dtype],
        )
        self._plans: dict[tuple[int, ...], NativePlan] = {}
        # Constants of layers in float32 by the identity of what they were made of, which is kept.
        self._constants: dict[int, tuple[Tensor, Tensor]] = {}

    def plan(self, batch: BatchView) -> NativePlan:
        self._cache.check_features(batch, self.features)
        starts = packed(batch.query_start_loc, torch.int64, "query_start_loc")
        lens = packed(batch.seq_lens, torch.int64, "seq_lens")
        slots = packed(batch.slot_mapping, torch.int64, "slot_mapping")
        table = batch.block_table
        if table.dtype is not torch.int32:
            raise ValueError(f"block_table must be torch.int32, got {table.dtype}")
        if table.stride(1) != 1:
            table = table.contiguous()
        threads = torch.get_num_threads()
        # The plan keeps its tensors, so nothing else can come to lie at these addresses.
        key = (
            starts.data_ptr(),
            lens.data_ptr(),
            slots.data_ptr(),
            table.data_ptr(),
            lens.shape[0],
            slots.shape[0],
            table.shape[1],
            table.stride(0),
            threads,
        )
        plan = self._plans.get(key)
        if plan is None:
            plan = self._new_plan((starts, lens, slots, table), threads)
            if len(self._plans) == _MOST_PLANS:
                del self._plans[next(iter(self._plans))]
            self._plans[key] = plan
        return plan

    def _new_plan(self, tensors: tuple[Tensor, Tensor, Tensor, Tensor], threads: int) -> NativePlan:
        """``tensors``: query_start_loc, seq_lens, slot_mapping and block_table."""
        starts, lens, slots, table = tensors
        rows, tokens = lens.shape[0], slots.shape[0]
        if starts.shape[0] != rows + 1 or table.shape[0] < rows:
            raise ValueError(
                f"query_start_loc {tuple(starts.shape)} and block_table {tuple(table.shape)} do "
                f"not fit seq_lens {tuple(lens.shape)}"
            )
        fields = _Plan.from_buffer_copy(self._template)
        longest = table.shape[1] * fields.block_size
        room = tokens + rows * min(_MOST_SPLITS, longest // _SPLIT_KEYS + 1)
        items = np.empty(room * _ITEM_BYTES, np.uint8)
        seen = np.empty(2 * rows + 1, np.int64)
        fields.num_rows, fields.num_tokens, fields.threads = rows, tokens, threads
        fields.query_start, fields.seq_lens = starts.data_ptr(), lens.data_ptr()
        fields.slots, fields.block_table = slots.data_ptr(), table.data_ptr()
        fields.table_stride, fields.table_width = table.stride(0), table.shape[1]
        fields.items, fields.item_room, fields.seen = items.ctypes.data, room, seen.ctypes.data
        return NativePlan(fields, ctypes.addressof(fields), tokens, (*tensors, items, seen))

    def write(self, k: Tensor, v: Tensor, cache: Tensor, plan: NativePlan) -> None:
        k, v = self._checked_new(k, v, plan)
        num_blocks = self._cache.num_blocks(cache)
        k_strides, v_strides = k.stride(), v.stride()
        status = self._functions.write(
            plan.address,
            ELEMENT_TYPES[k.dtype],
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

    def rotate_and_write(
        self,
        qkv: tuple[Tensor, Tensor, Tensor],
        positions: Tensor,
        rotation: HeadRotation,
        cache: Tensor,
        plan: NativePlan,
    ) -> Tensor:
        """One call with the bits of two, where the rotation would be that of the kernels here
        anyway. Keys are rounded to their own dtype before the cache's, as if they had been kept."""
        if rotation.provider not in ROTATIONS:
            return AttentionBackend.rotate_and_write(self, qkv, positions, rotation, cache, plan)
        q, k, v = qkv
        k, v = self._checked_new(k, v, plan)
        num_blocks = self._cache.num_blocks(cache)
        norm = HeadNorm(rotation.q_weight, rotation.k_weight, rotation.eps)
        out = torch.empty(q.shape, dtype=q.dtype)
        call = RotationCall.of((q, k), (out, None), norm, rotation.cos_sin, positions)
        status = self._functions.rotate_and_write(
            plan.address,
            v.data_ptr(),
            v.stride(0),
            v.stride(1),
            cache.data_ptr(),
            num_blocks,
            *call.values,
        )
        if status == _BAD_POSITION:
            raise position_beyond(rotation.cos_sin, positions)
        if status:
            _raise(status, num_blocks)
        return out

    def run(
        self,
        q: Tensor,
        cache: Tensor,
        plan: NativePlan,
        layer: LayerParams,
        lse: Tensor | None = None,
    ) -> Tensor:
        q = _elements(q, "q")
        self._cache.check_query(q, plan.num_tokens, layer)
        tokens, num_heads, _ = q.shape
        num_blocks = self._cache.num_blocks(cache)
        sinks = self._per_head(layer.sinks, num_heads, "sinks")
        slopes = self._per_head(layer.alibi_slopes, num_heads, "alibi_slopes")
        sums = lse
        if lse is not None and (lse.dtype is not torch.float32 or not lse.is_contiguous()):
            sums = torch.empty_like(
                lse, dtype=torch.float32, memory_format=torch.contiguous_format
            ).copy_(lse)
        out = torch.empty((tokens, num_heads, self._v_dim), dtype=q.dtype)
        strides = q.stride()
        status = self._functions.run(
            plan.address,
            num_heads,
            ELEMENT_TYPES[q.dtype],
            q.data_ptr(),
            strides[0],
            strides[1],
            cache.data_ptr(),
            num_blocks,
            out.data_ptr(),
            0 if sums is None else sums.data_ptr(),
            sinks,
            slopes,
            layer.window or 0,
            layer.scale,
            layer.softcap or 0.0,
        )
        if status:
            _raise(status, num_blocks)
        if lse is not None and sums is not None and sums is not lse:
            lse.copy_(sums)
        return out

    def _checked_new(self, k: Tensor, v: Tensor, plan: NativePlan) -> tuple[Tensor, Tensor]:
        """Keys and values of a step as the kernels take them."""
        k, v = _elements(k, "k"), _elements(v, "v")
        self._cache.check_new(k, v, plan.num_tokens)
        if k.dtype is not v.dtype:
            raise ValueError(f"k and v must have one dtype, got {k.dtype} and {v.dtype}")
        return k, v

    def _per_head(self, values: Tensor | None, num_heads: int, name: str) -> int:
        """Address of ``values`` in float32, which stays valid with the backend; None: 0."""
        if values is None:
            return 0
        found = self._constants.get(id(values))
        if found is None or len(found[1]) != num_heads:
            found = values, per_head(values, num_heads, name)
            self._constants[id(values)] = found
        return found[1].data_ptr()


def _elements(tensor: Tensor, name: str) -> Tensor:
    """``tensor`` with the elements of a head one after the other."""
    if tensor.dtype not in ELEMENT_TYPES:
        raise ValueError(
            f"{name} must be {', '.join(str(dtype) for dtype in ELEMENT_TYPES)}, got {tensor.dtype}"
        )
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _raise(status: int, num_blocks: int) -> None:
    if status == _BAD_BLOCK:
        raise beyond(num_blocks)
    if status == _BAD_ROWS:
        raise ValueError(
            "query_start_loc must ascend from 0 to at most the number of tokens, and seq_lens lie "
            "between a row's query tokens and what its blocks hold"
        )
    check(status)
