"""Paged attention in plain torch: what all backends on gathered keys and values share.

A step is planned as chunks. A chunk holds pieces of rows (at most ``MAX_PIECE`` query tokens each)
with the same padded query length and about as many keys, few enough that what it gathers stays
within a bound of bytes. So a step takes a few large operations, whatever the batch, and no loop
over sequences or heads. Padding repeats the last query or key of a piece: no slot is ever read
that its sequence has not written, and padded queries yield what the real one does.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

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
from cardan.core.interfaces.capabilities import DeviceInfo
from cardan.core.interfaces.device import Device
from cardan.core.interfaces.errors import UnsupportedError
from cardan.core.interfaces.torch_kv_content import loaded_content, stored_content
from cardan.core.types.kv import DTYPE_BYTES, KV_DTYPES, SCALE_BYTES, KVCacheSpec

Int64 = npt.NDArray[np.int64]

# Longest run of query tokens handled as one piece; long prompts become several.
MAX_PIECE = 256
# Query-key pairs of one piece and head, at most; bounds the scores of long contexts.
MAX_PAIRS = 1 << 21
# Query heads for each key head assumed when memory is planned.
ASSUMED_GROUP = 8
# Chunks are not split to save key padding below this many keys.
MIN_KEYS = 256


@dataclass(slots=True)
class Chunk:
    """n pieces of P (padded) query tokens that look at K (padded) keys each.

    Attributes:
        shape: (n, P, K).
        tokens: [n * P] query tokens; padding repeats a piece's last one. None: all tokens of the
            step in order.
        keys: [n * num_kv_heads * K] rows of the cache as ``[num_slots * num_kv_heads, content]``.
        distance: [n, P, K] query position minus key position; negative: not visible.
        hidden: [n, 1, P, K] bool, what a query must not see; None: it may see all.
    """

    shape: tuple[int, int, int]
    tokens: Tensor | None
    keys: Tensor
    distance: Tensor
    hidden: Tensor | None


@dataclass(slots=True)
class TorchPlan:
    """One step for one KV group. ``chunks`` has one list for each window in use, made when the
    first layer of that window runs; ``masks`` is the backend's, for what it derives from them."""

    batch: BatchView
    pieces: "Pieces"
    write_slots: Tensor
    covers_all: bool
    chunks: dict[int | None, list[Chunk]] = field(default_factory=dict)
    masks: dict[int | None, list[Tensor | None]] = field(default_factory=dict)


@dataclass(slots=True)
class Pieces:
    """Pieces of rows in order of chunks (host arrays of one length), and where chunks end.

    Attributes:
        row: row of the batch.
        token: first query token.
        length: query tokens, padded to ``padded``.
        position: position of the first query token in its sequence.
        ends: end of each chunk in the arrays.
    """

    row: Int64
    token: Int64
    length: Int64
    padded: Int64
    position: Int64
    ends: list[int]

    @property
    def num_keys(self) -> Int64:
        """Keys that the last query of each piece sees without a window."""
        return self.position + self.length


def cut_pieces(
    query_lens: Sequence[int], seq_lens: Sequence[int], costs: tuple[int, int], max_bytes: int
) -> Pieces:
    """Cut a step's rows into pieces and group them into chunks of about ``max_bytes``.

    ``costs``: bytes for each key of a piece, and for each pair of query and key, over all heads.
    """
    queries = np.asarray(query_lens, dtype=np.int64)
    keys = np.asarray(seq_lens, dtype=np.int64)
    # A power of two between 16 and MAX_PIECE that keeps a piece within MAX_PAIRS.
    longest = 1 << np.log2(np.clip(MAX_PAIRS // np.maximum(keys, 1), 16, MAX_PIECE)).astype(
        np.int64
    )
    counts = -(-queries // longest)
    row = np.repeat(np.arange(len(queries)), counts)
    within = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    start = within * longest[row]
    length = np.minimum(longest[row], queries[row] - start)
    padded = 1 << np.ceil(np.log2(length)).astype(np.int64)
    position = keys[row] - queries[row] + start
    token = (np.cumsum(queries) - queries)[row] + start
    order = np.lexsort((token, -(position + length), padded))
    pieces = Pieces(row[order], token[order], length[order], padded[order], position[order], [])
    _group(pieces, costs, max_bytes)
    return pieces


def _group(pieces: Pieces, costs: tuple[int, int], max_bytes: int) -> None:
    """Fill ``pieces.ends``: equal padded length, at least half the keys of the chunk's first."""
    keys, padded = pieces.num_keys, pieces.padded
    start, total = 0, len(keys)
    while start < total:
        most = int(keys[start])
        bytes_per_piece = most * (costs[0] + costs[1] * int(padded[start]))
        fits = max(1, max_bytes // bytes_per_piece)
        end = min(total, start + fits)
        end = start + int(np.searchsorted(padded[start:end], padded[start], side="right"))
        if most > MIN_KEYS:
            end = start + int(np.searchsorted(-keys[start:end], -(most // 2), side="right"))
        pieces.ends.append(end)
        start = end


class TorchAttention(AttentionBackend):
    """Layout, planning and writing for backends that gather; they implement ``attend``."""

    # Bytes that one chunk may gather, scores included.
    max_chunk_bytes: ClassVar[int] = 256 << 20
    # Whether ``attend`` takes keys and values in other dtypes than the queries'.
    takes_mixed_dtypes: ClassVar[bool] = False

    @classmethod
    def layout(cls, spec: KVCacheSpec, device: DeviceInfo) -> KVLayout:
        """``[block, 2, token in block, head, content]``."""
        return KVLayout()

    def __init__(self, spec: KVCacheSpec, layout: KVLayout, device: Device) -> None:
        if layout.order != KVLayout().order or layout.opaque:
            raise UnsupportedError(f"{self.name} attention reads only its own cache layout")
        if spec.scale_bytes != SCALE_BYTES.get(spec.dtype, 0):
            raise UnsupportedError(
                f"{self.name} attention reads no {spec.dtype} cache with scales of "
                f"{spec.scale_bytes} bytes"
            )
        self._spec = spec

    def plan(self, batch: BatchView) -> TorchPlan:
        unknown = batch.features - self.features
        if unknown:
            raise UnsupportedError(
                f"{self.name} attention cannot honour {', '.join(sorted(unknown))}"
            )
        spec = self._spec
        content = spec.num_kv_heads * (spec.k_head_dim + spec.v_head_dim)
        # Keys and values as they are and widened; scores and mask.
        costs = (content * (DTYPE_BYTES[spec.dtype] + 4), spec.num_kv_heads * ASSUMED_GROUP * 8)
        pieces = cut_pieces(batch.query_lens, batch.seq_lens_host, costs, self.max_chunk_bytes)
        slots = batch.slot_mapping.clamp(min=0)
        block = slots // spec.block_size
        # Each block holds its keys, then its values: slot s of block b is key row 2 * b * size + s.
        write_slots = slots + block * spec.block_size
        plan = TorchPlan(batch, pieces, write_slots, sum(batch.query_lens) == batch.num_tokens)
        window = spec.window if spec.kind == "sliding_window" else None
        plan.chunks[window] = self._chunks(plan, window)
        return plan

    def write(self, k: Tensor, v: Tensor, cache: Tensor, plan: TorchPlan) -> None:
        rows = cache.flatten(0, 2)
        keys = stored_content(k, self._spec, cache.dtype)
        rows[..., : keys.shape[-1]].index_copy_(0, plan.write_slots, keys)
        # The same slots, one half block further on.
        values = stored_content(v, self._spec, cache.dtype)
        rows = rows[self._spec.block_size :, :, : values.shape[-1]]
        rows.index_copy_(0, plan.write_slots, values)

    def run(
        self,
        q: Tensor,
        cache: Tensor,
        plan: TorchPlan,
        layer: LayerParams,
        lse: Tensor | None = None,
    ) -> Tensor:
        if layer.k_scale is not None or layer.v_scale is not None:
            raise UnsupportedError(
                f"{self.name} attention reads no cache that is scaled layer by layer"
            )
        if layer.window not in plan.chunks:
            plan.chunks[layer.window] = self._chunks(plan, layer.window)
        shape = (q.shape[0], q.shape[1], self._spec.v_head_dim)
        # Tokens of no row are padding; they must not hold what memory happened to hold.
        out = q.new_empty(shape) if plan.covers_all else q.new_zeros(shape)
        for index, chunk in enumerate(plan.chunks[layer.window]):
            queries = q if chunk.tokens is None else q.index_select(0, chunk.tokens)
            queries = queries.unflatten(0, chunk.shape[:2])
            keys, values = self._gather(cache, chunk)
            if not self.takes_mixed_dtypes:
                keys, values = keys.to(q.dtype), values.to(q.dtype)
            result, sums = self.attend(
                (queries, keys, values), (plan, index), layer, lse is not None
            )
            if chunk.tokens is None:
                out.copy_(result.flatten(0, 1))
            else:
                out.index_copy_(0, chunk.tokens, result.flatten(0, 1))
            if lse is not None and sums is not None:
                tokens = slice(None) if chunk.tokens is None else chunk.tokens
                lse[tokens] = sums.flatten(0, 1)
        return out

    @abstractmethod
    def attend(
        self,
        inputs: tuple[Tensor, Tensor, Tensor],
        place: tuple[TorchPlan, int],
        layer: LayerParams,
        lse: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of one chunk, which is ``place[0].chunks[layer.window][place[1]]``.

        ``inputs``: q [n, P, num_heads, k_head_dim], k [n, num_kv_heads, K, k_head_dim], v alike;
        all in q's dtype, or, with ``takes_mixed_dtypes``, keys and values in the cache's dtype,
        float32 from a cache with scales.
        Returns [n, P, num_heads, v_head_dim] in q's dtype and, if ``lse``, the log-sum-exp
        [n, P, num_heads] float32.
        """

    def _gather(self, cache: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor]:
        spec = self._spec
        rows = cache.flatten(0, 3)
        shape = (chunk.shape[0], spec.num_kv_heads, chunk.shape[2])
        keys = rows.index_select(0, chunk.keys).unflatten(0, shape)
        shifted = rows[spec.block_size * spec.num_kv_heads :]
        values = shifted.index_select(0, chunk.keys).unflatten(0, shape)
        return (
            loaded_content(keys, spec.k_head_dim, spec),
            loaded_content(values, spec.v_head_dim, spec),
        )

    def _chunks(self, plan: TorchPlan, window: int | None) -> list[Chunk]:
        pieces = plan.pieces
        first_key = np.zeros_like(pieces.position)
        if window is not None:
            first_key = np.maximum(pieces.position - window + 1, 0)
        table = np.stack((pieces.row, pieces.token, pieces.length, pieces.position, first_key))
        device = plan.batch.positions.device
        on_device = torch.from_numpy(table).to(device)
        widths = pieces.num_keys - first_key
        chunks: list[Chunk] = []
        start = 0
        for end in pieces.ends:
            width = int(widths[start:end].max())
            # One query that sees as many keys as any other needs no mask.
            even = pieces.padded[start] == 1 and bool((widths[start:end] == width).all())
            size = (end - start, int(pieces.padded[start]), width)
            whole = size[1] == 1 and end - start == plan.batch.num_tokens and plan.covers_all
            in_order = whole and bool((np.diff(pieces.token[start:end]) == 1).all())
            chunk = self._chunk(plan, on_device[:, start:end], size, window)
            chunk.tokens = None if in_order else chunk.tokens
            chunk.hidden = None if even else chunk.hidden
            chunks.append(chunk)
            start = end
        return chunks

    def _chunk(
        self, plan: TorchPlan, table: Tensor, size: tuple[int, int, int], window: int | None
    ) -> Chunk:
        spec = self._spec
        row, token, length, position, first_key = table.unsqueeze(2)
        device = table.device
        offset = torch.arange(size[1], device=device).minimum(length - 1)
        reach = torch.arange(size[2], device=device) + first_key
        key = reach.minimum(position + length - 1)
        block = plan.batch.block_table[row, key // spec.block_size].to(torch.int64)
        slot = block * (2 * spec.block_size) + key % spec.block_size
        heads = torch.arange(spec.num_kv_heads, device=device)
        rows = slot.unsqueeze(1) * spec.num_kv_heads + heads.unsqueeze(1)
        distance = (position + offset).unsqueeze(2) - reach.unsqueeze(1)
        hidden = distance < 0
        if window is not None:
            hidden |= distance >= window
        return Chunk(
            size, (token + offset).flatten(), rows.flatten(), distance, hidden.unsqueeze(1)
        )


def refusals(need: AttentionNeed) -> Iterator[str]:
    """What no backend of this module can do, of what ``need`` asks for."""
    if need.kind != "mha":
        yield f"kind {need.kind} is not mha"
    if need.kv_dtype not in (need.dtype, *KV_DTYPES):
        yield f"kv dtype {need.kv_dtype} is not among {', '.join(KV_DTYPES)}"
    if need.num_heads % need.num_kv_heads:
        yield f"{need.num_heads} heads are no multiple of {need.num_kv_heads} key heads"
    if need.tree_mask:
        yield "no tree masks"
    if need.captured:
        yield "shapes follow the batch, so steps cannot be captured"
