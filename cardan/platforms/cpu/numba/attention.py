"""Paged attention by numba: keys and values are read from the cache where they lie, once for all
query heads that share them. Importing this compiles nothing and imports no numba."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

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
from cardan.core.interfaces.torch_attention import refusals
from cardan.core.interfaces.torch_kv_content import stored_content
from cardan.core.types.kv import KVCacheSpec
from cardan.platforms.cpu.numba.availability import missing_reason
from cardan.platforms.cpu.paged_cache import ORDER, PagedCache, beyond, packed, per_head

Int64 = npt.NDArray[np.int64]

_DTYPES = ("float32", "bfloat16", "float16")
# Kinds of caches in attention_kernel.py.
_KINDS = {"float32": 0, "bfloat16": 1, "float16": 2, "int8": 3}
# Query tokens of one item at most: enough to share the work of reading keys, few enough that
# threads get equal parts.
_MOST_TOKENS = 16


@dataclass(frozen=True, slots=True)
class NumbaPlan:
    """One step. At ``address`` are the fields of attention_kernel.py; ``kept`` owns them and what
    they point to."""

    address: int
    num_tokens: int
    num_items: int
    covers_all: bool
    kept: tuple[Tensor | Int64, ...]


@dataclass(frozen=True, slots=True)
class _Kernels:
    attend: Callable[..., int]
    store: Callable[..., int]


@cache
def _kernels() -> _Kernels:
    from cardan.platforms.cpu.numba import attention_kernel

    return _Kernels(attention_kernel.attend, attention_kernel.store)


class NumbaAttention(AttentionBackend):
    """Multi-head, grouped and multi-query attention with all that ``LayerParams`` offers but
    scales of a layer."""

    name = "cpu.numba"

    @classmethod
    def accepts(cls, need: AttentionNeed, device: DeviceInfo) -> Verdict:
        reasons = list(refusals(need))
        if need.dtype not in _DTYPES:
            reasons.append(f"dtype {need.dtype} is not among {', '.join(_DTYPES)}")
        if need.kv_dtype not in _KINDS:
            reasons.append(f"kv dtype {need.kv_dtype} is not among {', '.join(_KINDS)}")
        if not reasons:
            missing = missing_reason()
            reasons += [] if missing is None else [missing]
        return Verdict(tuple(reasons))

    @classmethod
    def layout(cls, spec: KVCacheSpec, device: DeviceInfo) -> KVLayout:
        return KVLayout(order=ORDER)

    def __init__(self, spec: KVCacheSpec, layout: KVLayout, device: Device) -> None:
        self._cache = PagedCache.of(self.name, spec, layout)
        self._spec = spec
        self._kernels = _kernels()

    def plan(self, batch: BatchView) -> NumbaPlan:
        self._cache.check_features(batch, self.features)
        spec = self._spec
        starts = packed(batch.query_start_loc, torch.int64, "query_start_loc")
        lens = packed(batch.seq_lens, torch.int64, "seq_lens")
        slots = packed(batch.slot_mapping, torch.int64, "slot_mapping")
        table = packed(batch.block_table, torch.int32, "block_table")
        queries = np.asarray(batch.query_lens, np.int64)
        lengths = np.asarray(batch.seq_lens_host, np.int64)
        room = table.shape[1] * spec.block_size
        if (queries > lengths).any() or (lengths > room).any() or queries.sum() > len(slots):
            raise ValueError(
                "query_lens must sum to at most the number of tokens, and seq_lens lie between a "
                "row's query tokens and what its blocks hold"
            )
        items = _items(queries, lengths, spec)
        fields = np.array(
            [
                *(len(queries), len(slots), spec.num_kv_heads, spec.k_head_dim, spec.v_head_dim),
                *(spec.block_size, spec.content_size, _KINDS[spec.dtype], table.shape[1]),
                *(starts.data_ptr(), lens.data_ptr(), table.data_ptr()),
                *(len(items), items.ctypes.data, slots.data_ptr()),
            ],
            np.int64,
        )
        covers_all = int(queries.sum()) == len(slots)
        kept = (fields, starts, lens, slots, table, items)
        return NumbaPlan(fields.ctypes.data, len(slots), len(items), covers_all, kept)

    def write(self, k: Tensor, v: Tensor, cache: Tensor, plan: NumbaPlan) -> None:
        spec = self._spec
        self._cache.check_new(k, v, plan.num_tokens)
        num_blocks = self._cache.num_blocks(cache)
        element = cache.element_size()
        keys, values = (_dense(stored_content(x, spec, cache.dtype)) for x in (k, v))
        k_strides, v_strides = keys.stride(), values.stride()
        fault = self._kernels.store(
            plan.address,
            keys.data_ptr(),
            k_strides[0] * element,
            k_strides[1] * element,
            keys.shape[2] * element,
            values.data_ptr(),
            v_strides[0] * element,
            v_strides[1] * element,
            values.shape[2] * element,
            cache.data_ptr(),
            num_blocks,
            spec.content_size * element,
        )
        if fault:
            raise beyond(num_blocks)

    def run(
        self,
        q: Tensor,
        cache: Tensor,
        plan: NumbaPlan,
        layer: LayerParams,
        lse: Tensor | None = None,
    ) -> Tensor:
        self._cache.check_query(q, plan.num_tokens, layer)
        tokens, num_heads, _ = q.shape
        spec = self._spec
        num_blocks = self._cache.num_blocks(cache)
        wide = q.to(torch.float32).contiguous()
        shape = (tokens, num_heads, spec.v_head_dim)
        # Tokens of no row are padding; they must not hold what memory happened to hold.
        out = torch.empty(shape) if plan.covers_all else torch.zeros(shape)
        sums = None if lse is None else lse.to(torch.float32).contiguous()
        sinks = _per_head(layer.sinks, num_heads, "sinks")
        slopes = _per_head(layer.alibi_slopes, num_heads, "alibi_slopes")
        fault = self._kernels.attend(
            min(torch.get_num_threads(), max(1, plan.num_items)),
            plan.address,
            wide.data_ptr(),
            num_heads,
            out.data_ptr(),
            0 if sums is None else sums.data_ptr(),
            0 if sinks is None else sinks.data_ptr(),
            0 if slopes is None else slopes.data_ptr(),
            cache.data_ptr(),
            num_blocks,
            layer.window or 0,
            layer.scale,
            layer.softcap or 0.0,
        )
        if fault:
            raise beyond(num_blocks)
        if lse is not None and sums is not None and sums is not lse:
            lse.copy_(sums)
        return out.to(q.dtype)


def _items(queries: Int64, lengths: Int64, spec: KVCacheSpec) -> Int64:
    """Row, first token, tokens and key head of each item, those with most work first."""
    counts = -(-queries // _MOST_TOKENS)
    row = np.repeat(np.arange(len(queries)), counts)
    within = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    start = within * _MOST_TOKENS
    count = np.minimum(_MOST_TOKENS, queries[row] - start)
    token = (np.cumsum(queries) - queries)[row] + start
    keys = lengths[row] - queries[row] + start + count
    order = np.argsort(-count * keys, kind="stable")
    heads = np.arange(spec.num_kv_heads)
    shape = (len(order), len(heads))
    columns = [np.broadcast_to(x[order, None], shape) for x in (row, token, count)]
    items = np.stack((*columns, np.broadcast_to(heads, shape)), axis=-1)
    return np.ascontiguousarray(items.reshape(-1, 4), np.int64)


def _dense(content: Tensor) -> Tensor:
    """``content`` with the elements of a head one after the other."""
    return content if content.stride(2) == 1 else content.contiguous()


def _per_head(values: Tensor | None, num_heads: int, name: str) -> Tensor | None:
    return None if values is None else per_head(values, num_heads, name)
