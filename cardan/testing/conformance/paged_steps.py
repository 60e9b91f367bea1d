"""Requests that advance step by step over one paged cache, as in a running engine."""

from dataclasses import dataclass, field, replace

import numpy as np
import torch

from cardan.core.interfaces.attention import BatchView, LayerParams
from cardan.testing.conformance.attention_truth import Float64, attend_row, concatenate
from cardan.testing.conformance.paged_batches import (
    Geometry,
    Placement,
    batch_view,
    blank_cache,
)


@dataclass(slots=True)
class _Request:
    """Tokens of one request, of which ``computed`` are in the cache, in ``blocks``."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    blocks: list[int] = field(default_factory=list)
    computed: int = 0

    @property
    def num_left(self) -> int:
        return len(self.queries) - self.computed


class PagedSteps:
    """A fixed number of rows; a request that is done leaves its blocks and row to a new one.

    Everything in the cache was written by the backend under test. The step's tensors stay where
    they are as long as the shape is the same, as in the engine.
    """

    def __init__(
        self, geometry: Geometry, num_rows: int, rng: np.random.Generator, placement: Placement
    ) -> None:
        self._geometry = geometry
        self._rng = rng
        self._placement = placement
        self._longest = 6 * geometry.block_size
        self.num_blocks = num_rows * 6 + 1
        self._free = list(range(1, self.num_blocks))
        self._requests = [self._new_request() for _ in range(num_rows)]
        self._step: list[int] = []
        self._views: dict[tuple[int, ...], BatchView] = {}

    def new_cache(self) -> torch.Tensor:
        """A cache for all blocks in physical shape that reads as NaN everywhere."""
        return blank_cache(self._geometry, self._placement, self.num_blocks)

    def begin(self) -> BatchView:
        """Schedule one token or more of every request; blocks are allocated as they fill."""
        for row, request in enumerate(self._requests):
            if not request.num_left:
                self._free += request.blocks
                self._requests[row] = self._new_request()
        self._step = [
            min(request.num_left, int(self._rng.choice([1, 1, 3, self._geometry.block_size + 2])))
            for request in self._requests
        ]
        fresh = self._fresh_view()
        key = (*fresh.block_table.shape, fresh.num_tokens)
        if key in self._views:
            fresh = _moved_into(self._views[key], fresh)
        self._views[key] = fresh
        return fresh

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The step's queries, keys and values on the device, padded with NaN."""
        view_tokens = self._placement.shapes.padded_tokens(
            sum(self._step) + self._placement.padding
        )
        packed = []
        for name in ("queries", "keys", "values"):
            parts = [
                getattr(request, name)[request.computed : request.computed + count]
                for request, count in zip(self._requests, self._step, strict=True)
            ]
            blank = parts[0].new_full(
                (view_tokens - sum(self._step), *parts[0].shape[1:]), torch.nan
            )
            packed.append(torch.cat([*parts, blank]).to(self._placement.torch_device))
        return packed[0], packed[1], packed[2]

    def finish(self, layer: LayerParams) -> Float64:
        """Book the step; the true output of its tokens."""
        outs = []
        for request, count in zip(self._requests, self._step, strict=True):
            start, end = request.computed, request.computed + count
            held = self._geometry.held
            keys, values = held(request.keys[:end]), held(request.values[:end])
            outs.append(attend_row(request.queries[start:end], keys, values, layer))
            request.computed = end
        return concatenate(outs)[0]

    def _new_request(self) -> _Request:
        length = int(self._rng.integers(1, self._longest + 1))
        return _Request(*self._geometry.draw(self._rng, length))

    def _fresh_view(self) -> BatchView:
        size = self._geometry.block_size
        positions, row_of, slots, rows = [], [], [], []
        for row, (request, count) in enumerate(zip(self._requests, self._step, strict=True)):
            end = request.computed + count
            while len(request.blocks) * size < end:
                # The block that was freed last is the first to be used again.
                request.blocks.append(self._free.pop())
            rows.append((count, end))
            for position in range(request.computed, end):
                positions.append(position)
                row_of.append(row)
                slots.append(request.blocks[position // size] * size + position % size)
        width = max(len(request.blocks) for request in self._requests)
        table = np.zeros((len(rows), width), np.int32)
        for row, request in enumerate(self._requests):
            table[row, : len(request.blocks)] = request.blocks
        return batch_view(rows, (positions, row_of, slots), table, size, self._placement)


def _moved_into(old: BatchView, new: BatchView) -> BatchView:
    """``new`` in the tensors of ``old``."""
    names = (
        "query_start_loc",
        "seq_lens",
        "positions",
        "token_rows",
        "slot_mapping",
        "block_table",
    )
    kept = {name: getattr(old, name) for name in names}
    for name, tensor in kept.items():
        tensor.copy_(getattr(new, name))
    return replace(new, **kept)
