"""Running sequences as a struct of arrays: a steady step is arithmetic over these columns.

Token line of a row::

    |---- prompt ----|---- answer known ----|- pending -|
    0                                   num_tokens
    |------ num_computed ------|
                               |-- need --|     up to min(num_tokens + num_pending, limit - 1)

``num_computed`` counts tokens whose KV exists or is being computed by a step in flight;
``num_pending`` counts tokens that steps in flight will sample.

Columns are indexed by arrays of ``intp``: any other integer type is converted at each access.
"""

import numpy as np
import numpy.typing as npt

from cardan.core.scheduler.sequence import NO_ROW, Sequence

_NO_TOKEN = -1
_NO_KEY = -1

Int32 = npt.NDArray[np.int32]
Rows = npt.NDArray[np.intp]


class RowTable:
    """Owner of the rows ``0 .. max_num_rows - 1`` and of their columns."""

    def __init__(self, max_num_rows: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        self._free = list(range(max_num_rows - 1, -1, -1))
        self._sequences: list[Sequence | None] = [None] * max_num_rows
        self.keys = np.full(max_num_rows, _NO_KEY, np.int64)
        # First step of the sequence's stay; results of earlier steps are not for this stay.
        self.first_step = np.zeros(max_num_rows, np.int64)
        # Zeroed pages are mapped only when a row's tokens reach them.
        self.token_ids = np.zeros((max_num_rows, max_model_len), np.int32)
        self.num_tokens = np.zeros(max_num_rows, np.int32)
        self.num_computed = np.zeros(max_num_rows, np.int32)
        # Tokens that were known when the sequence entered the row.
        self.num_entry = np.zeros(max_num_rows, np.int32)
        self.num_pending = np.zeros(max_num_rows, np.int32)
        self.limit = np.zeros(max_num_rows, np.int32)
        # Number of tokens before which a stop token does not count.
        self.min_num_tokens = np.zeros(max_num_rows, np.int32)
        # Tokens that fit into the row's blocks, and that are in findable blocks.
        self.capacity = np.zeros(max_num_rows, np.int32)
        self.num_registered = np.zeros(max_num_rows, np.int32)
        # Stop token i of each row, for as many as any row ever had.
        self.stop_columns: list[Int32] = []
        self.wants_logprobs = np.zeros(max_num_rows, np.bool_)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def sequence(self, row: int) -> Sequence:
        sequence = self._sequences[row]
        if sequence is None:
            raise RuntimeError(f"row {row} is empty")
        return sequence

    def add(self, sequence: Sequence, num_computed: int, step_id: int) -> int:
        """Give a sequence a row from step ``step_id`` on; the caller has checked ``num_free``."""
        row = self._free.pop()
        sequence.row = row
        self._sequences[row] = sequence
        count = len(sequence.token_ids)
        self.keys[row] = sequence.key
        self.first_step[row] = step_id
        self.token_ids[row, :count] = sequence.token_ids
        self.num_tokens[row] = count
        self.num_computed[row] = num_computed
        self.num_entry[row] = count
        self.num_pending[row] = 0
        self.limit[row] = sequence.limit
        self.min_num_tokens[row] = sequence.num_prompt_tokens + sequence.params.min_tokens
        self.sync_blocks(sequence)
        self._set_stop_ids(row, sequence.stop_token_ids)
        self.wants_logprobs[row] = sequence.params.logprobs is not None
        return row

    def remove(self, sequence: Sequence) -> int:
        """Take a sequence's row away; its known tokens move back to the object."""
        row = sequence.row
        sequence.token_ids = self.token_ids[row, : self.num_tokens[row]].copy()
        sequence.row = NO_ROW
        self._sequences[row] = None
        self.keys[row] = _NO_KEY
        self.limit[row] = 0
        self._free.append(row)
        return row

    def sync_blocks(self, sequence: Sequence) -> None:
        """Refresh the columns that mirror the sequence's blocks."""
        blocks = sequence.blocks
        self.capacity[sequence.row] = blocks.num_blocks * self.block_size
        self.num_registered[sequence.row] = blocks.num_registered * self.block_size

    def need(self, rows: Rows) -> Int32:
        """Tokens that each row still has to compute as far as is known."""
        need = self.num_tokens[rows]
        need += self.num_pending[rows]
        # The last token of a sequence is never computed.
        np.minimum(need, self.limit[rows] - 1, out=need)
        need -= self.num_computed[rows]
        return need

    @property
    def num_growing(self) -> int:
        """How many rows may yet need more blocks than they have."""
        # An empty row has a limit of zero.
        return int(np.count_nonzero(self.limit - 1 > self.capacity))

    def stops(self, rows: Rows, token_ids: Int32) -> npt.NDArray[np.bool_] | None:
        """Whether each row's newest token, already counted, is a stop token that counts.

        None: no row's is.
        """
        found: npt.NDArray[np.bool_] | None = None
        for column in self.stop_columns:
            hit = column[rows] == token_ids
            found = hit if found is None else found | hit
        if found is None or not np.count_nonzero(found):
            return None
        counts: npt.NDArray[np.bool_] = self.num_tokens[rows] > self.min_num_tokens[rows]
        return found & counts

    def _set_stop_ids(self, row: int, stop_token_ids: tuple[int, ...]) -> None:
        for _ in range(len(self.stop_columns), len(stop_token_ids)):
            self.stop_columns.append(np.full(len(self.keys), _NO_TOKEN, np.int32))
        for index, column in enumerate(self.stop_columns):
            column[row] = stop_token_ids[index] if index < len(stop_token_ids) else _NO_TOKEN
