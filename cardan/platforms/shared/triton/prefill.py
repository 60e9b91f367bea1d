"""Attention of long rows over keys that lie side by side: the step's own, or gathered ones."""

from dataclasses import dataclass, field

import numpy as np
import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from cardan.core.interfaces.attention import BatchView
from cardan.platforms.shared.triton.attention_tuning import PrefillTuning, prefill_tuning
from cardan.platforms.shared.triton.kernels.prefill_attention import gather_kernel, prefill_kernel
from cardan.platforms.shared.triton.layer_call import LayerCall, dense
from cardan.platforms.shared.triton.targets import DeviceSizes

# Where copies of tiles may begin, and what strides are multiples of, bytes.
_COPY_ALIGNMENT = 16
# The longest row of a step has at least so many query tokens, else tiles would be mostly empty.
_LEAST_QUERIES = 64
# Query tokens for each key, in the mean, that pay for gathering it.
_LEAST_QUERIES_GATHERED = 256
# Bytes that are gathered at once, over all key heads or, where contexts are longer, some of them.
_MOST_GATHERED = 128 << 20
_GATHER_TILE = 64
# Bytes of keys and values that all cores read at the same time and that stay in their cache.
_SHARED_KEYS = 32 << 20


@dataclass(slots=True)
class LongRows:
    """What a step's rows of several query tokens are, as far as the host knows it.

    ``is_fresh``: none of them has earlier keys. ``num_keys``: of them all, if gathering these pays,
    else 0. ``starts`` [rows + 1] of the gathered keys are made when the first layer asks.

    ``step_k`` and ``step_v`` are those of the layer that runs next, [T, key heads * dim].
    """

    is_fresh: bool = False
    num_keys: int = 0
    step_k: Tensor | None = None
    step_v: Tensor | None = None
    starts: Tensor | None = field(default=None, repr=False)

    def keep(self, k: Tensor, v: Tensor) -> None:
        """Keys and values [T, heads, dim] of the layer that runs next."""
        self.step_k, self.step_v = _side_by_side(k), _side_by_side(v)

    def take(self) -> tuple[Tensor, Tensor] | None:
        """What was kept, if it can be copied in tiles."""
        k, v = self.step_k, self.step_v
        self.step_k = self.step_v = None
        return None if k is None or v is None else (k, v)


def long_rows(batch: BatchView) -> LongRows:
    """Of a step that is captured nothing is known: the host has bounds, which no row reaches."""
    counts = np.asarray(batch.query_lens, dtype=np.int64)
    lengths = np.asarray(batch.seq_lens_host, dtype=np.int64)
    longest = int(counts.max(initial=0))
    if longest != batch.max_query_len or longest < _LEAST_QUERIES:
        return LongRows()
    is_long = counts > 1
    counts, lengths = counts[is_long], lengths[is_long]
    num_keys = int(lengths.sum())
    pays = int((counts * lengths).sum()) >= _LEAST_QUERIES_GATHERED * num_keys
    return LongRows(bool((counts == lengths).all()), num_keys if pays else 0)


def run_prefill(call: LayerCall, batch: BatchView, rows: LongRows, device: DeviceSizes) -> bool:
    """Serve the step's long rows, and its tokens of no row; False: it cannot be done here."""
    kept = rows.take()
    sizes = call.sizes(call.q.element_size())
    tuning = prefill_tuning(sizes, device, _is_plain(call))
    num_heads = call.spec.num_kv_heads
    is_whole = (sizes.k_block, sizes.v_block) == (sizes.k_dim, sizes.v_dim)
    if kept is not None and is_whole and kept[0].dtype == call.q.dtype:
        _launch(call, batch, tuning, (*kept, batch.query_start_loc), (0, num_heads))
        return True
    width = (sizes.k_block + sizes.v_block) * sizes.num_bytes
    at_once = min(num_heads, _MOST_GATHERED // max(1, rows.num_keys * width))
    if not rows.num_keys or not at_once or call.layer.window is not None:
        return False
    if rows.starts is None:
        rows.starts = _starts(batch)
    for first in range(0, num_heads, at_once):
        last = min(num_heads, first + at_once)
        gathered = _gather(call, batch, rows, (first, last))
        _launch(call, batch, tuning, gathered, (first, last))
    return True


def _is_plain(call: LayerCall) -> bool:
    layer = call.layer
    return layer.softcap is None and layer.alibi_slopes is None and layer.window is None


def _starts(batch: BatchView) -> Tensor:
    """Where the keys of each row begin when all rows of several query tokens lie side by side."""
    counts = batch.query_start_loc.diff()
    lengths = torch.where(counts > 1, batch.seq_lens, 0)
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def _gather(
    call: LayerCall, batch: BatchView, rows: LongRows, heads: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values of some key heads, [keys, heads * block], in the dtype that is computed in,
    and where each row's begin."""
    assert rows.starts is not None
    first, last = heads
    sizes = call.sizes(call.q.element_size())
    count, device = last - first, call.q.device
    k, v = (
        torch.empty(rows.num_keys, count * block, dtype=call.q.dtype, device=device)
        for block in (sizes.k_block, sizes.v_block)
    )
    table = dense(batch.block_table)
    num_tiles = rows.num_keys // _GATHER_TILE + batch.num_rows + 1
    gather_kernel[(num_tiles, count)](
        call.cache,
        call.form.scales(call.cache),
        k,
        v,
        rows.starts,
        table,
        batch.num_rows,
        first,
        table.stride(0),
        **call.form.constants(call.cache),
        K_DIM=sizes.k_dim,
        V_DIM=sizes.v_dim,
        K_BLOCK=sizes.k_block,
        V_BLOCK=sizes.v_block,
        TILE=_GATHER_TILE,
        num_warps=4,
    )
    return k, v, rows.starts


def _launch(
    call: LayerCall,
    batch: BatchView,
    tuning: PrefillTuning,
    keys: tuple[Tensor, Tensor, Tensor],
    kv_heads: tuple[int, int],
) -> None:
    (k, v, starts), layer = keys, call.layer
    sizes = call.sizes(call.q.element_size())
    first, last = (head * sizes.group for head in kv_heads)
    # Heads whose keys the cores can share at a time.
    section = max(1, _SHARED_KEYS // max(1, sizes.tile_bytes(batch.max_seq_len)))
    section = min(section * sizes.group, last - first)
    num_tiles = batch.num_tokens // tuning.queries + batch.num_rows + 1
    prefill_kernel[(section, num_tiles, triton.cdiv(last - first, section))](
        call.q,
        call.out,
        *map(call.given, (call.lse, layer.sinks, layer.alibi_slopes)),
        *map(call.given, (layer.k_scale, layer.v_scale)),
        k,
        v,
        TensorDescriptor.from_tensor(k, [tuning.tile, sizes.k_block]),
        TensorDescriptor.from_tensor(v, [tuning.tile, sizes.v_block]),
        starts,
        batch.query_start_loc,
        batch.seq_lens,
        batch.num_rows,
        batch.num_tokens,
        first,
        last,
        call.q.shape[1],
        *call.numbers(),
        *call.q.stride()[:2],
        *call.scale_strides(),
        k.stride(0),
        v.stride(0),
        TILE_QUERIES=tuning.queries,
        TILE=tuning.tile,
        EDGE=tuning.edge,
        STAGES=tuning.num_stages,
        MASKED_STAGES=tuning.masked_stages,
        HAS_WINDOW=layer.window is not None,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        **call.constants(sizes),
    )


def _side_by_side(heads: Tensor) -> Tensor | None:
    """[T, heads, dim] as [T, heads * dim], or None where it cannot be copied in tiles."""
    if heads.stride(1) != heads.shape[2] or heads.data_ptr() % _COPY_ALIGNMENT:
        return None
    if heads.stride(0) * heads.element_size() % _COPY_ALIGNMENT:
        return None
    return heads.flatten(1)
