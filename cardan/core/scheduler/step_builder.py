"""Collects one step's plan while the scheduler decides."""

import numpy as np
import numpy.typing as npt

from cardan.core.scheduler.row_table import RowTable
from cardan.core.scheduler.sequence import Sequence
from cardan.core.types.step import (
    BlockCopies,
    BlockEdits,
    NewRow,
    SchedulerOutput,
)

IntPairs = list[tuple[int, int]]


class _GroupChanges:
    """Changes to one KV group's block table and pool."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.columns: list[int] = []
        self.block_ids: list[int] = []
        self.copies: IntPairs = []

    def edits(self) -> BlockEdits:
        columns = (self.rows, self.columns, self.block_ids)
        return BlockEdits(*(np.array(column, np.int32) for column in columns))

    def block_copies(self) -> BlockCopies:
        pairs = np.array(self.copies, np.int32).reshape(-1, 2)
        return BlockCopies(pairs[:, 0].copy(), pairs[:, 1].copy())


class StepBuilder:
    """A plan in the making. A sequence that was added can be dropped again (preemption)."""

    def __init__(self, num_groups: int, budget: int) -> None:
        self.budget = budget
        self._groups = [_GroupChanges() for _ in range(num_groups)]
        self._new_rows: dict[int, NewRow] = {}
        self._rows: list[npt.NDArray[np.int32]] = []
        self._counts: list[npt.NDArray[np.int32]] = []

    def add_rows(self, rows: npt.NDArray[np.int32], counts: npt.NDArray[np.int32]) -> None:
        """Compute ``counts[i]`` more tokens of ``rows[i]``."""
        self._rows.append(rows)
        self._counts.append(counts)
        self.budget -= int(counts.sum())

    def add_blocks(self, row: int, first_column: int, added: tuple[list[int], ...]) -> None:
        for group, ids in zip(self._groups, added, strict=True):
            group.rows.extend([row] * len(ids))
            group.columns.extend(range(first_column, first_column + len(ids)))
            group.block_ids.extend(ids)

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
            keep = [place for place, owner in enumerate(group.rows) if owner != row]
            group.rows = [group.rows[place] for place in keep]
            group.columns = [group.columns[place] for place in keep]
            group.block_ids = [group.block_ids[place] for place in keep]

    def build(self, step_id: int, freed_rows: list[int], table: RowTable) -> SchedulerOutput:
        """Close the plan and move the table's counters past it."""
        empty = np.zeros(0, np.int32)
        rows = np.concatenate(self._rows) if self._rows else empty
        counts = np.concatenate(self._counts) if self._counts else empty
        if not counts.all():
            keep = counts > 0
            rows, counts = rows[keep], counts[keep]
        computed = table.num_computed[rows]
        after = computed + counts
        samples = after == table.num_tokens[rows] + table.num_pending[rows]
        table.num_computed[rows] = after
        table.num_pending[rows] += samples
        return SchedulerOutput(
            step_id=step_id,
            new_rows=list(self._new_rows.values()),
            freed_rows=freed_rows,
            block_edits=tuple(group.edits() for group in self._groups),
            block_copies=tuple(group.block_copies() for group in self._groups),
            rows=rows,
            keys=table.keys[rows],
            num_scheduled_tokens=counts,
            num_computed_tokens=computed,
            samples=samples,
        )
