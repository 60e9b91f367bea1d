"""Collects one step's plan while the scheduler decides."""

import numpy as np
import numpy.typing as npt

from cardan.core.scheduler.row_table import RowTable
from cardan.core.scheduler.sequence import Sequence
from cardan.core.scheduler.shares import Shares
from cardan.core.types.step import (
    BlockCopies,
    BlockEdits,
    NewRow,
    SchedulerOutput,
)

IntPairs = list[tuple[int, int]]
Int32 = npt.NDArray[np.int32]
Rows = npt.NDArray[np.intp]

_NO_INTS = np.zeros(0, np.int32)
_NO_EDITS = BlockEdits(_NO_INTS, _NO_INTS, _NO_INTS)
_NO_COPIES = BlockCopies(_NO_INTS, _NO_INTS)


class _GroupChanges:
    """Changes to one KV group's block table and pool."""

    def __init__(self) -> None:
        self.edits: list[BlockEdits] = []
        self.copies: IntPairs = []

    def all_edits(self) -> BlockEdits:
        if len(self.edits) == 1:
            return self.edits[0]
        if not self.edits:
            return _NO_EDITS
        return BlockEdits(
            np.concatenate([edits.rows for edits in self.edits]),
            np.concatenate([edits.columns for edits in self.edits]),
            np.concatenate([edits.block_ids for edits in self.edits]),
        )

    def all_copies(self) -> BlockCopies:
        if not self.copies:
            return _NO_COPIES
        pairs = np.array(self.copies, np.int32)
        return BlockCopies(pairs[:, 0].copy(), pairs[:, 1].copy())

    def drop_row(self, row: int) -> None:
        for place, edits in enumerate(self.edits):
            keep = edits.rows != row
            self.edits[place] = BlockEdits(
                edits.rows[keep], edits.columns[keep], edits.block_ids[keep]
            )


class StepBuilder:
    """A plan in the making. A sequence that was added can be dropped again (preemption)."""

    def __init__(self, num_groups: int, budget: int) -> None:
        self.budget = budget
        self._groups = [_GroupChanges() for _ in range(num_groups)]
        self._new_rows: dict[int, NewRow] = {}
        self._rows: list[Rows] = []
        self._counts: list[Int32] = []

    def add_shares(self, shares: Shares) -> None:
        """Compute what running rows were given; the budget is what is left for others."""
        self._rows.append(shares.rows)
        self._counts.append(shares.counts)
        self.budget = shares.rest

    def add_row(self, row: int, count: int) -> None:
        """Compute ``count`` tokens of a row that was not added before."""
        self._rows.append(np.array([row], np.intp))
        self._counts.append(np.array([count], np.int32))
        self.budget -= count

    def add_tokens(self, row: int, more: int) -> None:
        """Compute ``more`` further tokens of a row that was added."""
        for rows, counts in zip(self._rows, self._counts, strict=True):
            counts[rows == row] += more
        self.budget -= more

    def add_blocks(
        self, rows: Rows, first: Int32, counts: Int32, added: tuple[list[int], ...]
    ) -> None:
        """Append ``counts[i]`` blocks to the table of ``rows[i]``, from column ``first[i]`` on.

        ``added`` has the ids of each group, those of the first row first.
        """
        columns = first
        if len(added[0]) > len(rows):
            before = np.cumsum(counts) - counts
            rows = rows.repeat(counts)
            columns = (first - before).repeat(counts) + np.arange(len(rows), dtype=np.int32)
        rows32 = rows.astype(np.int32)
        for group, ids in zip(self._groups, added, strict=True):
            group.edits.append(BlockEdits(rows32, columns, np.array(ids, np.int32)))

    def add_copies(self, copies: tuple[IntPairs, ...]) -> None:
        for group, pairs in zip(self._groups, copies, strict=True):
            group.copies.extend(pairs)

    def add_sequence(self, sequence: Sequence, num_computed: int) -> None:
        """Tell the runner about a sequence that has just got its row and blocks."""
        self._new_rows[sequence.row] = NewRow(
            row=sequence.row,
            key=sequence.key,
            token_ids=sequence.token_ids,
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_computed_tokens=num_computed,
            params=sequence.params,
            seed=sequence.seed,
            stop_token_ids=sequence.stop_token_ids,
            bad_words_token_ids=sequence.request.bad_words_token_ids,
            block_ids=tuple(np.array(ids, np.int32) for ids in sequence.blocks.blocks),
            adapter=sequence.request.adapter,
        )

    def drop_row(self, row: int) -> None:
        """Take back everything planned for ``row``, which is preempted.

        Only rows that ran before this step are dropped, so no new row is lost. Its tokens return
        to the budget.
        """
        for rows, counts in zip(self._rows, self._counts, strict=True):
            hit = rows == row
            self.budget += int(counts[hit].sum())
            counts[hit] = 0
        for group in self._groups:
            group.drop_row(row)

    def build(self, step_id: int, freed_rows: list[int], table: RowTable) -> SchedulerOutput:
        """Close the plan and move the table's counters past it."""
        rows, counts = self._batch()
        computed = table.num_computed[rows]
        after = computed + counts
        samples = after == table.num_tokens[rows] + table.num_pending[rows]
        table.num_computed[rows] = after
        table.num_pending[rows] += samples
        return SchedulerOutput(
            step_id=step_id,
            new_rows=list(self._new_rows.values()),
            freed_rows=freed_rows,
            block_edits=tuple([group.all_edits() for group in self._groups]),
            block_copies=tuple([group.all_copies() for group in self._groups]),
            rows=rows.astype(np.int32),
            keys=table.keys[rows],
            num_scheduled_tokens=counts,
            num_computed_tokens=computed,
            samples=samples,
        )

    def _batch(self) -> tuple[Rows, Int32]:
        """Rows that compute anything, and how much."""
        if not self._rows:
            return np.zeros(0, np.intp), _NO_INTS
        rows, counts = self._rows[0], self._counts[0]
        if len(self._rows) > 1:
            rows, counts = np.concatenate(self._rows), np.concatenate(self._counts)
        if np.count_nonzero(counts) < len(counts):
            keep = counts > 0
            rows, counts = rows[keep], counts[keep]
        return rows, counts
