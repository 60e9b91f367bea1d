"""Block tables of all rows, one for each KV group, and what the device does not know of them."""

from collections.abc import Sequence

import numpy as np

from cardan.core.types.step import BlockEdits, Int32, Int64, NewRow


class BlockTables:
    """Owner of ``tables`` [G, max_num_rows, max_blocks] int32, on the host; unused entries are
    stale.

    A row's changes are kept as one span of columns for each group until the row is computed next;
    then ``take_changes`` hands them to whoever keeps the device's copy.
    """

    def __init__(self, num_groups: int, max_num_rows: int, max_blocks: int) -> None:
        # Zeroed pages are mapped only when a row's blocks reach them.
        self.tables = np.zeros((num_groups, max_num_rows, max_blocks), np.int32)
        self._first = np.full((num_groups, max_num_rows), max_blocks, np.int32)
        self._end = np.zeros((num_groups, max_num_rows), np.int32)
        self.has_changes = False

    @property
    def num_groups(self) -> int:
        return self.tables.shape[0]

    @property
    def max_blocks(self) -> int:
        return self.tables.shape[2]

    def add(self, row: NewRow) -> None:
        for group, ids in enumerate(row.block_ids):
            self.tables[group, row.row, : len(ids)] = ids
            self._first[group, row.row] = 0
            self._end[group, row.row] = len(ids)
        self.has_changes = True

    def edit(self, edits: tuple[BlockEdits, ...]) -> None:
        for group, edit in enumerate(edits):
            if len(edit.rows):
                self.tables[group, edit.rows, edit.columns] = edit.block_ids
                np.minimum.at(self._first[group], edit.rows, edit.columns)
                np.maximum.at(self._end[group], edit.rows, edit.columns + 1)
                self.has_changes = True

    def remove(self, rows: Sequence[int]) -> None:
        """Forget changes of rows that will not be computed again."""
        if rows:
            self._forget(rows)

    def take_changes(self, rows: Int32) -> tuple[Int32, Int32, Int32]:
        """What changed in ``rows`` [R] since it was asked for: the first column and the number of
        columns, [G, R] each, and the blocks in them, those of the first group first."""
        first = self._first[:, rows]
        counts = np.maximum(self._end[:, rows] - first, 0)
        groups, places = counts.nonzero()
        lengths: Int64 = counts[groups, places].astype(np.int64)
        skipped = first[groups, places] - (np.cumsum(lengths) - lengths)
        columns = np.repeat(skipped, lengths) + np.arange(int(lengths.sum()))
        spans = (np.repeat(groups, lengths), np.repeat(rows[places], lengths), columns)
        self._forget(rows)
        return first, counts, self.tables[spans]

    def _forget(self, rows: Int32 | Sequence[int]) -> None:
        self._first[:, rows] = self.max_blocks
        self._end[:, rows] = 0
        self.has_changes = bool(self._end.any())
