"""What the host knows of the rows: block tables, sampling settings, edits. No tokens: those are on
the device."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cardan.core.interfaces.random_stream import random_streams, uniforms
from cardan.core.types.step import BlockEdits, Bool, Int32, NewRow, SchedulerOutput
from cardan.platforms.tpu.row_edits import RowEdits

Fields = dict[str, npt.NDArray[np.generic]]


class Rows:
    """State of the permanent rows, from the plan that brings a sequence to the one that frees it.

    Attributes:
        tables: [rows, blocks] int32 block ids.
        num_prompt_tokens: [rows] int32.
        num_logprobs, num_prompt_logprobs: [rows] int32, -1: none are wanted.
        edits: of the rows whose logits are changed.
        has_edits: [rows] bool, which those are.
    """

    def __init__(self, num_rows: int, num_blocks: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.tables = np.zeros((num_rows, num_blocks), np.int32)
        self.num_prompt_tokens = np.zeros(num_rows, np.int32)
        self.num_logprobs = np.full(num_rows, -1, np.int32)
        self.num_prompt_logprobs = np.full(num_rows, -1, np.int32)
        self.edits: dict[int, RowEdits] = {}
        self.has_edits = np.zeros(num_rows, np.bool_)
        self._live: set[int] = set()
        self._temperature = np.zeros(num_rows, np.float32)
        self._top_k = np.zeros(num_rows, np.int32)
        self._top_p = np.ones(num_rows, np.float32)
        self._min_p = np.zeros(num_rows, np.float32)
        self._streams = np.zeros(num_rows, np.uint64)

    @property
    def num_live(self) -> int:
        return len(self._live)

    def apply(self, step: SchedulerOutput) -> None:
        """Free rows, new rows, edits of tables, in this order."""
        for row in step.freed_rows:
            self._live.discard(row)
            self.edits.pop(row, None)
            self.has_edits[row] = False
            self.num_logprobs[row] = self.num_prompt_logprobs[row] = -1
        for new in step.new_rows:
            self._add(new)
        edits: BlockEdits = step.block_edits[0]
        self.tables[edits.rows, edits.columns] = edits.block_ids

    def sampling_fields(self, rows: Int32, num_outputs: Int32, padded: int) -> Fields:
        """``temperature``, ``top_k``, ``top_p``, ``min_p`` and ``uniform`` of a step's rows, whose
        sequences have ``num_outputs`` outputs; padding is greedy."""
        temperature = self._temperature[rows]
        drawn = uniforms(self._streams[rows], np.maximum(num_outputs, 0).astype(np.int64))
        # Rounding must not reach 1.
        uniform = np.minimum(drawn.astype(np.float32), np.float32(1 - 2**-24))
        return {
            "temperature": padded_to(temperature, padded, 0.0),
            "top_k": padded_to(self._top_k[rows], padded, 0),
            "top_p": padded_to(self._top_p[rows], padded, 1.0),
            "min_p": padded_to(self._min_p[rows], padded, 0.0),
            "uniform": padded_to(uniform, padded, 0.0),
        }

    def edits_of(self, rows: Int32, samples: Bool) -> Sequence[tuple[int, RowEdits]]:
        """Edits of those of ``rows`` that sample, by their index."""
        places = np.flatnonzero(self.has_edits[rows] & samples)
        return [(place, self.edits[int(rows[place])]) for place in places.tolist()]

    def _add(self, new: NewRow) -> None:
        row, params = new.row, new.params
        self._live.add(row)
        blocks = new.block_ids[0]
        self.tables[row, : len(blocks)] = blocks
        self.tables[row, len(blocks) :] = 0
        self.num_prompt_tokens[row] = new.num_prompt_tokens
        self.num_logprobs[row] = self._table_size(params.logprobs)
        self.num_prompt_logprobs[row] = self._table_size(params.prompt_logprobs)
        edits = RowEdits.of(new, self.vocab_size)
        self.has_edits[row] = edits is not None
        if edits is not None:
            self.edits[row] = edits
        # The likeliest token has at least the probability 1/V, so it alone reaches such a top_p.
        greedy = params.is_greedy or params.top_p * self.vocab_size <= 1
        self._temperature[row] = 0.0 if greedy else params.temperature
        self._top_k[row] = min(params.top_k, self.vocab_size)
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        self._streams[row] = random_streams(np.asarray([new.seed], np.int64))[0]

    def _table_size(self, wanted: int | None) -> int:
        if wanted is None:
            return -1
        return self.vocab_size if wanted == -1 else wanted


def padded_to(array: npt.NDArray[np.generic], size: int, value: float) -> npt.NDArray[np.generic]:
    """The array [n, ...] as [size, ...], with ``value`` behind."""
    padded = np.full((size, *array.shape[1:]), value, array.dtype)
    padded[: len(array)] = array
    return padded
