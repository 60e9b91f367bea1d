"""What the fake executor's device knows of the rows; touched by the device's thread alone."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cardan.core.types.sampling_params import SamplingParams
from cardan.core.types.step import Int32, NewRow, SchedulerOutput

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One step's tokens, row by row; T tokens, R rows, of which S sample.

    ``token_ids``, ``positions``, ``slots`` [T]; ``starts`` and ``counts`` [R] cut them into rows;
    ``computed`` [R] tokens before this step; ``block_table`` [R, B]; ``sampling`` [S] indices of
    rows; ``rows`` [R] their numbers; ``block_size`` tokens.
    """

    rows: Int32
    token_ids: Int32
    positions: Int64
    slots: Int64
    starts: Int64
    counts: Int64
    computed: Int64
    block_table: Int32
    sampling: Int64
    block_size: int

    @property
    def last(self) -> Int64:
        """[S] index of each sampling row's last token."""
        ends: Int64 = (self.starts + self.counts - 1)[self.sampling]
        return ends


class DeviceRows:
    """Known tokens, block tables and settings of each row, applied from plans."""

    def __init__(
        self, num_rows: int, max_model_len: int, block_size: int, loses_edits: bool = False
    ) -> None:
        """``loses_edits``: a fault, blocks that rows get later are not noted."""
        self._block_size = block_size
        self._loses_edits = loses_edits
        self._tokens = np.zeros((num_rows, max_model_len), np.int32)
        self._tables = np.zeros((num_rows, -(-max_model_len // block_size)), np.int32)
        self._new: list[NewRow | None] = [None] * num_rows
        self.seeds = np.zeros(num_rows, np.int64)
        self.num_prompt_tokens = np.zeros(num_rows, np.int64)

    @property
    def num_live(self) -> int:
        return sum(item is not None for item in self._new)

    def params(self, row: int) -> SamplingParams:
        entry = self._new[row]
        if entry is None:
            raise RuntimeError(f"row {row} is empty")
        return entry.params

    def apply(self, plan: SchedulerOutput) -> None:
        """Free rows, new rows, edits, in this order; copies are the model's."""
        for row in plan.freed_rows:
            self._new[row] = None
        for new in plan.new_rows:
            self._new[new.row] = new
            self._tokens[new.row, : len(new.token_ids)] = new.token_ids
            self._tables[new.row, : len(new.block_ids[0])] = new.block_ids[0]
            self.seeds[new.row] = new.seed
            self.num_prompt_tokens[new.row] = new.num_prompt_tokens
        for edits in () if self._loses_edits else plan.block_edits:
            self._tables[edits.rows, edits.columns] = edits.block_ids

    def gather(self, plan: SchedulerOutput) -> StepBatch:
        counts = plan.num_scheduled_tokens.astype(np.int64)
        computed = plan.num_computed_tokens.astype(np.int64)
        starts = np.cumsum(counts) - counts
        token_rows = np.repeat(np.arange(len(counts)), counts)
        positions = np.arange(len(token_rows)) + (computed - starts)[token_rows]
        table = self._tables[plan.rows]
        blocks = table[token_rows, positions // self._block_size].astype(np.int64)
        return StepBatch(
            rows=plan.rows,
            token_ids=self._tokens[plan.rows[token_rows], positions],
            positions=positions,
            slots=blocks * self._block_size + positions % self._block_size,
            starts=starts,
            counts=counts,
            computed=computed,
            block_table=table,
            sampling=np.flatnonzero(plan.samples),
            block_size=self._block_size,
        )

    def append(self, batch: StepBatch, token_ids: Int32) -> None:
        """Keep sampled tokens [S], so that the next step reads them here."""
        rows = batch.rows[batch.sampling]
        where = (batch.computed + batch.counts)[batch.sampling]
        self._tokens[rows, where] = token_ids
