"""Gathers one step's tensors from the rows, into buffers that stay where they are."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cardan.core.interfaces.attention import BatchView
from cardan.core.runner.block_tables import BlockTables
from cardan.core.runner.request_states import RequestStates
from cardan.core.runner.step_shapes import StepShape
from cardan.core.types.step import SchedulerOutput

Int64Array = npt.NDArray[np.int64]


@dataclass(slots=True)
class StepInputs:
    """One step's tensors; T tokens and R rows, padding included.

    ``token_ids`` [T] int64 and ``positions`` [T] int64; ``views`` has one entry a KV group;
    ``logit_places`` int64: the token of each sampling row whose hidden state gives its logits.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    views: tuple[BatchView, ...]
    logit_places: torch.Tensor


class InputBatch:
    """Owner of the step buffers, sized for the largest step.

    Steps of one shape have their tensors at the same addresses, where captured graphs read them.
    """

    def __init__(
        self, max_num_tokens: int, max_num_rows: int, tables: BlockTables, block_size: int
    ) -> None:
        """The largest step is given with its padding."""
        device = tables.tables[0].device
        self._block_size = block_size
        self.tables = tables

        def buffer(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self._token_ids = buffer(max_num_tokens)
        self._positions = buffer(max_num_tokens)
        self._token_rows = buffer(max_num_tokens)
        self._query_start_loc = buffer(max_num_rows + 1)
        self._seq_lens = buffer(max_num_rows)
        self._logit_places = buffer(max_num_rows)
        self._slots = tuple(buffer(max_num_tokens) for _ in tables.tables)
        # Flat: tables of any width lie at the start, without gaps.
        self._block_tables = tuple(
            buffer(max_num_rows * table.shape[1], dtype=torch.int32) for table in tables.tables
        )

    def gather(
        self, plan: SchedulerOutput, states: RequestStates, shape: StepShape, num_logit_rows: int
    ) -> StepInputs:
        """Fill the buffers for ``plan``; device work only, besides arithmetic on the plan.

        ``num_logit_rows``: length of ``logit_places``; those past the samples repeat token 0.
        """
        counts = plan.num_scheduled_tokens.astype(np.int64)
        computed = plan.num_computed_tokens.astype(np.int64)
        num_rows, num_tokens = len(counts), int(counts.sum())
        ends = np.cumsum(counts)
        token_rows = np.repeat(np.arange(num_rows, dtype=np.int64), counts)
        positions = np.arange(num_tokens, dtype=np.int64) + np.repeat(
            computed - (ends - counts), counts
        )
        rows = self._upload_rows(plan.rows, shape.num_rows)
        common = self._common(
            _padded(counts, shape.num_rows, 0),
            _padded(computed + counts, shape.num_rows, 0),
            _padded(token_rows, shape.num_tokens, 0),
            _padded(positions, shape.num_tokens, 0),
        )
        token_ids = self._token_ids[: shape.num_tokens]
        where, places = common["positions"], common["token_rows"]
        token_ids.copy_(states.token_ids[rows.index_select(0, places), where])
        views = tuple(
            self._view(group, rows, num_tokens, shape, common) for group in range(len(self._slots))
        )
        logit_places = _upload(
            self._logit_places, _padded(ends[plan.samples] - 1, num_logit_rows, 0)
        )
        return StepInputs(token_ids, where, views, logit_places)

    def harmless(self, shape: StepShape) -> StepInputs:
        """Fill the buffers with a step of ``shape`` that reads the null block and writes nowhere.

        Each row has one token, as far as there are tokens; what the host knows of lengths is the
        most that a step of this shape can have.
        """
        num_rows = min(shape.num_rows, shape.num_tokens)
        ones = _padded(np.ones(num_rows, np.int64), shape.num_rows, 0)
        token_rows = _padded(np.arange(num_rows, dtype=np.int64), shape.num_tokens, 0)
        common = self._common(ones, ones, token_rows, np.zeros(shape.num_tokens, np.int64))
        common["max_query_len"] = 1 if shape.is_decode else shape.num_tokens
        common["max_seq_len"] = shape.num_blocks * self._block_size
        token_ids = self._token_ids[: shape.num_tokens].zero_()
        views = []
        for group in range(len(self._slots)):
            table = self._table(group, shape).zero_()
            slots = self._slots[group][: shape.num_tokens].fill_(-1)
            views.append(BatchView(slot_mapping=slots, block_table=table, **common))
        return StepInputs(token_ids, common["positions"], tuple(views), self._logit_places[:0])

    def _common(
        self,
        query_lens: Int64Array,
        seq_lens: Int64Array,
        token_rows: Int64Array,
        positions: Int64Array,
    ) -> dict[str, Any]:
        """What the views of all groups have in common, uploaded."""
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(query_lens)])
        return {
            "query_lens": query_lens.tolist(),
            "seq_lens_host": seq_lens.tolist(),
            "query_start_loc": _upload(self._query_start_loc, starts),
            "seq_lens": _upload(self._seq_lens, seq_lens),
            "positions": _upload(self._positions, positions),
            "token_rows": _upload(self._token_rows, token_rows),
            "max_query_len": int(query_lens.max()),
            "max_seq_len": int(seq_lens.max()),
        }

    def _upload_rows(self, rows: npt.NDArray[np.int32], padded: int) -> torch.Tensor:
        # Padding rows read row 0: their query length of 0 makes it irrelevant.
        host = torch.from_numpy(_padded(rows.astype(np.int64), padded, 0))
        return host.to(self._positions.device, non_blocking=True)

    def _table(self, group: int, shape: StepShape) -> torch.Tensor:
        flat = self._block_tables[group][: shape.num_rows * shape.num_blocks]
        return flat.view(shape.num_rows, shape.num_blocks)

    def _view(
        self,
        group: int,
        rows: torch.Tensor,
        num_tokens: int,
        shape: StepShape,
        common: dict[str, Any],
    ) -> BatchView:
        table = self._table(group, shape)
        source = self.tables.tables[group][:, : shape.num_blocks]
        table.copy_(source.index_select(0, rows))
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
