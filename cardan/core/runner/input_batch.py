"""Gathers one step's tensors from the rows, into buffers that stay where they are."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cardan.core.interfaces.attention import BatchView
from cardan.core.interfaces.graphs import ShapePolicy
from cardan.core.runner.block_tables import BlockTables
from cardan.core.runner.request_states import RequestStates
from cardan.core.types.step import SchedulerOutput

Int64Array = npt.NDArray[np.int64]


@dataclass(slots=True)
class StepInputs:
    """One step's tensors; T tokens and R rows, padding included.

    ``token_ids`` [T] int64 and ``positions`` [T] int64; ``views`` has one entry a KV group;
    ``logit_places`` [S] int64: the token of each sampling row whose hidden state gives its logits.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    views: tuple[BatchView, ...]
    logit_places: torch.Tensor


class InputBatch:
    """Owner of the step buffers, sized for the largest step; a captured graph may read them."""

    def __init__(
        self,
        max_num_tokens: int,
        max_num_rows: int,
        tables: BlockTables,
        block_size: int,
        shapes: ShapePolicy,
    ) -> None:
        device = tables.tables[0].device
        max_tokens = max(shapes.padded_tokens(max_num_tokens), max_num_tokens)
        max_rows = max(shapes.padded_sequences(max_num_rows), max_num_rows)
        self._shapes = shapes
        self._block_size = block_size
        self._tables = tables

        def buffer(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self._token_ids = buffer(max_tokens)
        self._positions = buffer(max_tokens)
        self._token_rows = buffer(max_tokens)
        self._query_start_loc = buffer(max_rows + 1)
        self._seq_lens = buffer(max_rows)
        self._logit_places = buffer(max_rows)
        self._slots = tuple(buffer(max_tokens) for _ in tables.tables)
        self._block_tables = tuple(
            buffer(max_rows, table.shape[1], dtype=torch.int32) for table in tables.tables
        )

    def gather(self, plan: SchedulerOutput, states: RequestStates) -> StepInputs:
        """Fill the buffers for ``plan``; device work only, besides arithmetic on the plan."""
        counts = plan.num_scheduled_tokens.astype(np.int64)
        computed = plan.num_computed_tokens.astype(np.int64)
        num_rows, num_tokens = len(counts), int(counts.sum())
        ends = np.cumsum(counts)
        token_rows = np.repeat(np.arange(num_rows, dtype=np.int64), counts)
        positions = np.arange(num_tokens, dtype=np.int64) + np.repeat(
            computed - (ends - counts), counts
        )
        padded_rows = self._shapes.padded_sequences(num_rows)
        padded_tokens = self._shapes.padded_tokens(num_tokens)
        query_lens = _padded(counts, padded_rows, 0)
        seq_lens = _padded(computed + counts, padded_rows, 0)
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(query_lens)])
        rows = self._upload_rows(plan.rows, padded_rows)
        places = _upload(self._token_rows, _padded(token_rows, padded_tokens, 0))
        where = _upload(self._positions, _padded(positions, padded_tokens, 0))
        token_ids = self._token_ids[:padded_tokens]
        token_ids.copy_(states.token_ids[rows.index_select(0, places), where])
        common = {
            "query_lens": query_lens.tolist(),
            "seq_lens_host": seq_lens.tolist(),
            "query_start_loc": _upload(self._query_start_loc, starts),
            "seq_lens": _upload(self._seq_lens, seq_lens),
            "positions": where,
            "token_rows": places,
            "max_query_len": int(counts.max()),
            "max_seq_len": int(seq_lens.max()),
        }
        views = tuple(
            self._view(group, rows, num_tokens, common) for group in range(len(self._slots))
        )
        logit_places = _upload(self._logit_places, ends[plan.samples] - 1)
        return StepInputs(token_ids, where, views, logit_places)

    def _upload_rows(self, rows: npt.NDArray[np.int32], padded: int) -> torch.Tensor:
        # Padding rows read row 0: their query length of 0 makes it irrelevant.
        host = torch.from_numpy(_padded(rows.astype(np.int64), padded, 0))
        return host.to(self._positions.device, non_blocking=True)

    def _view(
        self, group: int, rows: torch.Tensor, num_tokens: int, common: dict[str, Any]
    ) -> BatchView:
        max_blocks = -(-self._shapes.padded_kv_len(common["max_seq_len"]) // self._block_size)
        source = self._tables.tables[group]
        max_blocks = min(max_blocks, source.shape[1])
        table = self._block_tables[group][: len(rows), :max_blocks]
        table.copy_(source[:, :max_blocks].index_select(0, rows))
        positions, places = common["positions"], common["token_rows"]
        slots = self._slots[group][: len(positions)]
        blocks = table[places, positions // self._block_size].to(torch.int64)
        slots.copy_(blocks * self._block_size + positions % self._block_size)
        slots[num_tokens:] = -1
        return BatchView(slot_mapping=slots, block_table=table, **common)


def _padded(values: Int64Array, size: int, fill: int) -> Int64Array:
    if len(values) == size:
        return values
    padded = np.full(size, fill, np.int64)
    padded[: len(values)] = values
    return padded


def _upload(buffer: torch.Tensor, values: Int64Array) -> torch.Tensor:
    target = buffer[: len(values)]
    target.copy_(torch.from_numpy(values), non_blocking=True)
    return target
