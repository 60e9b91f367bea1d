"""Ragged batches over a paged cache whose every unowned slot holds NaN."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cardan.core.interfaces.attention import (
    AttentionBackend,
    AttentionNeed,
    BatchView,
    KVLayout,
    LayerParams,
)
from cardan.core.interfaces.graphs import ShapePolicy
from cardan.core.interfaces.torch_device import physical_shape
from cardan.core.interfaces.torch_kv_content import loaded_content, stored_content
from cardan.core.types.kv import SCALE_BYTES, KVCacheSpec, KVKind
from cardan.testing.conformance.attention_truth import Float64, attend_row, concatenate

# Query tokens, and context length after the step.
Row = tuple[int, int]

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}

_SPARE_BLOCKS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Sizes of one attention layer and its cache; ``kv_dtype`` None: the computing ``dtype``."""

    heads: int = 6
    kv_heads: int = 2
    k_dim: int = 16
    v_dim: int = 16
    block_size: int = 4
    dtype: str = "float32"
    kv_dtype: str | None = None
    kind: KVKind = "full"
    window: int | None = None

    @property
    def spec(self) -> KVCacheSpec:
        return KVCacheSpec(
            kind=self.kind,
            block_size=self.block_size,
            num_kv_heads=self.kv_heads,
            k_head_dim=self.k_dim,
            v_head_dim=self.v_dim,
            dtype=self.kv_dtype or self.dtype,
            window=self.window,
            scale_bytes=SCALE_BYTES.get(self.kv_dtype or self.dtype, 0),
        )

    @property
    def need(self) -> AttentionNeed:
        """What a plain layer of these sizes asks for."""
        return AttentionNeed(
            kind="mha",
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            k_head_dim=self.k_dim,
            v_head_dim=self.v_dim,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype or self.dtype,
            block_size=self.block_size,
            windows=frozenset() if self.window is None else frozenset({self.window}),
        )

    @property
    def torch_dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.dtype]

    @property
    def cache_dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.kv_dtype or self.dtype]

    @property
    def blank(self) -> float:
        """Elements of it read as NaN; in bytes of all ones so does a scale."""
        return -1 if self.spec.scale_bytes else torch.nan

    def draw(
        self, rng: np.random.Generator, length: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Random queries, keys and values of ``length`` tokens, on the host.

        Keys and values are numbers that the cache can hold, as far as the computing dtype can.
        """

        def normal(num_heads: int, head_dim: int) -> torch.Tensor:
            drawn = rng.standard_normal((length, num_heads, head_dim))
            return torch.from_numpy(drawn).to(self.torch_dtype)

        keys, values = normal(self.kv_heads, self.k_dim), normal(self.kv_heads, self.v_dim)
        return (
            normal(self.heads, self.k_dim),
            self.held(keys).to(self.torch_dtype),
            self.held(values).to(self.torch_dtype),
        )

    def stored(self, part: torch.Tensor) -> torch.Tensor:
        """Keys or values as elements of the cache."""
        return stored_content(part, self.spec, self.cache_dtype)

    def held(self, part: torch.Tensor) -> torch.Tensor:
        """Keys or values [..., head_dim] as the cache gives them back, in a dtype of its own."""
        return loaded_content(self.stored(part), part.shape[-1], self.spec)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where and how a batch lies.

    Attributes:
        torch_device: of all tensors that a backend sees.
        layout: of the cache.
        order: seed of the order in which blocks are given out.
        padding: further tokens of no row, slot -1.
        drop_before: a window; blocks wholly before it have been given back (block id 0).
        shared: leading blocks that all rows have in common, in content and memory.
        shapes: buckets to pad to.
    """

    torch_device: torch.device = field(default_factory=partial(torch.device, "cpu"))
    layout: KVLayout = field(default_factory=KVLayout)
    order: int = 0
    padding: int = 0
    drop_before: int | None = None
    shared: int = 0
    shapes: ShapePolicy = field(default_factory=ShapePolicy)


class PagedBatch:
    """One step over ``rows``: their earlier keys and values are in ``cache``, the step's are not.

    ``queries``, ``keys``, ``values``: of each row's whole context, on the host.
    """

    def __init__(
        self,
        geometry: Geometry,
        rows: Sequence[Row],
        seed: int = 0,
        placement: Placement | None = None,
    ) -> None:
        self.geometry = geometry
        self.rows = list(rows)
        self.placement = placement or Placement()
        rng = np.random.default_rng(seed)
        drawn = [geometry.draw(rng, length) for _, length in self.rows]
        self.queries = [row[0] for row in drawn]
        self.keys = [row[1] for row in drawn]
        self.values = [row[2] for row in drawn]
        self._share()
        table = self._block_table()
        self.cache = blank_cache(geometry, self.placement, self.num_blocks)
        self._fill(table)
        self._drop(table)
        self.batch = self._view(table)

    @property
    def num_blocks(self) -> int:
        return sum(self._blocks_of(length) for _, length in self.rows) + _SPARE_BLOCKS + 1

    @property
    def num_query_tokens(self) -> int:
        return sum(count for count, _ in self.rows)

    def packed(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The step's tokens of all rows on the device; padding tokens are NaN."""
        steps = [
            part[len(part) - count :] for part, (count, _) in zip(parts, self.rows, strict=True)
        ]
        padding = self.batch.num_tokens - self.num_query_tokens
        blank = torch.full((padding, *parts[0].shape[1:]), torch.nan, dtype=parts[0].dtype)
        return torch.cat([*steps, blank]).to(self.placement.torch_device)

    def run(
        self, backend: AttentionBackend, layer: LayerParams, lse: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Plan, write and run one layer; the output [T, heads, v_dim] of the rows' tokens."""
        plan = backend.plan(self.batch)
        backend.write(self.packed(self.keys), self.packed(self.values), self.cache, plan)
        out = backend.run(self.packed(self.queries), self.cache, plan, layer, lse)
        return out[: self.num_query_tokens]

    def truth(self, layer: LayerParams) -> tuple[Float64, Float64]:
        """(output [T, heads, v_dim], log-sum-exp [T, heads]) of the rows' tokens."""
        return concatenate(
            [
                attend_row(q[len(q) - count :], self.geometry.held(k), self.geometry.held(v), layer)
                for q, k, v, (count, _) in zip(
                    self.queries, self.keys, self.values, self.rows, strict=True
                )
            ]
        )

    def _blocks_of(self, length: int) -> int:
        return -(-length // self.geometry.block_size)

    def _share(self) -> None:
        """Give all rows the first row's beginning, as far as it is shared."""
        common = self.placement.shared * self.geometry.block_size
        if common > min((length - count for count, length in self.rows), default=0):
            raise ValueError("a row's context is shorter than what rows share")
        for parts in (self.keys, self.values):
            for part in parts[1:]:
                part[:common] = parts[0][:common]

    def _block_table(self) -> npt.NDArray[np.int32]:
        """Block ids [rows, blocks of the longest row] in random order, 0 past a row's end."""
        rng = np.random.default_rng(self.placement.order)
        free = [int(block) for block in rng.permutation(np.arange(1, self.num_blocks))]
        width = max([*(self._blocks_of(length) for _, length in self.rows), 1])
        table = np.zeros((len(self.rows), width), dtype=np.int32)
        shared = [free.pop() for _ in range(self.placement.shared)]
        for row, (_, length) in enumerate(self.rows):
            count = self._blocks_of(length)
            table[row, :count] = [*shared, *(free.pop() for _ in range(count - len(shared)))]
        return table

    def _fill(self, table: npt.NDArray[np.int32]) -> None:
        logical = logical_cache(self.cache, self.placement.layout)
        geometry, size = self.geometry, self.geometry.block_size
        for row, (count, length) in enumerate(self.rows):
            positions = np.arange(length - count)
            blocks = torch.from_numpy(table[row, positions // size].astype(np.int64))
            offsets = torch.from_numpy(positions % size)
            for place, part in enumerate((self.keys[row], self.values[row])):
                stored = geometry.stored(part[: length - count]).to(logical.device)
                as_bits(logical)[blocks, place, :, offsets, : stored.shape[-1]] = as_bits(stored)

    def _drop(self, table: npt.NDArray[np.int32]) -> None:
        """Give back the blocks that lie wholly before the window of each row's first query."""
        if self.placement.drop_before is None:
            return
        logical = logical_cache(self.cache, self.placement.layout)
        for row, (count, length) in enumerate(self.rows):
            oldest = max(0, length - count - self.placement.drop_before + 1)
            for column in range(oldest // self.geometry.block_size):
                logical[int(table[row, column])] = self.geometry.blank
                table[row, column] = 0

    def _view(self, table: npt.NDArray[np.int32]) -> BatchView:
        size = self.geometry.block_size
        row_of = [row for row, (count, _) in enumerate(self.rows) for _ in range(count)]
        positions = [p for count, length in self.rows for p in range(length - count, length)]
        slots = [
            int(table[row, position // size]) * size + position % size
            for row, position in zip(row_of, positions, strict=True)
        ]
        return batch_view(self.rows, (positions, row_of, slots), table, size, self.placement)


def batch_view(
    rows: Sequence[Row],
    tokens: tuple[list[int], list[int], list[int]],
    table: npt.NDArray[np.int32],
    block_size: int,
    placement: Placement,
) -> BatchView:
    """What a backend sees of a step, padded; ``tokens``: position, row and slot of each."""
    positions, row_of, slots = tokens
    shapes = placement.shapes
    padding = shapes.padded_tokens(len(positions) + placement.padding) - len(positions)
    lens = [count for count, _ in rows]
    seq_lens = [length for _, length in rows]
    idle = shapes.padded_sequences(len(rows)) - len(rows)
    lens, seq_lens = lens + [0] * idle, seq_lens + [0] * idle
    longest = max([*seq_lens, 0])
    width = max(-(-shapes.padded_kv_len(longest) // block_size), table.shape[1])
    wide = np.pad(table, ((0, idle), (0, width - table.shape[1])))

    def tensor(values: Any, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.as_tensor(values).to(placement.torch_device, dtype)

    return BatchView(
        query_lens=lens,
        seq_lens_host=seq_lens,
        query_start_loc=tensor([0, *np.cumsum(lens).tolist()]),
        seq_lens=tensor(seq_lens),
        positions=tensor(positions + [0] * padding),
        token_rows=tensor(row_of + [0] * padding),
        slot_mapping=tensor(slots + [-1] * padding),
        block_table=tensor(wide, torch.int32),
        max_query_len=max([*lens, 0]),
        max_seq_len=longest,
    )


def blank_cache(geometry: Geometry, placement: Placement, num_blocks: int) -> torch.Tensor:
    """A cache in physical shape that reads as NaN everywhere."""
    shape = physical_shape(geometry.spec, placement.layout, num_blocks)
    blank = torch.full(shape, geometry.blank, device=placement.torch_device)
    return blank.to(geometry.cache_dtype)


def logical_cache(cache: torch.Tensor, layout: KVLayout) -> torch.Tensor:
    """``cache`` as ``[block, kv, head, token, content]``, a view."""
    return cache.permute(*(layout.order.index(axis) for axis in range(5)))


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Elements of one byte as plain bytes: few operations know dtypes that short."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
