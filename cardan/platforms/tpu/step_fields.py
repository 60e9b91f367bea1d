"""From a step's plan to the fields that its program reads. Vectorised over rows and tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from cardan.core.interfaces.executor import TokenMask
from cardan.core.types.step import Float32, Int32, SchedulerOutput
from cardan.platforms.tpu.buckets import table_size
from cardan.platforms.tpu.rows import Fields, Rows, padded_to
from cardan.platforms.tpu.step_edits import StepEdits, placed_masks
from cardan.platforms.tpu.step_layout import StepLayout, StepShape

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PromptTable:
    """Log-probabilities of one row's prompt: those that follow ``count`` tokens of the step from
    ``start`` on, with the ``size`` likeliest tokens."""

    row: int
    start: int
    count: int
    size: int


class StepFields:
    """Arrays of one step, before they are padded to a program's shape.

    ``counts`` and ``computed`` [R]: tokens of this step and before it; ``starts`` [R]: first token
    of each row in the step.
    """

    def __init__(self, step: SchedulerOutput, rows: Rows, mask: TokenMask | None = None) -> None:
        self._rows = rows
        self.rows: Int32 = step.rows
        self.samples = step.samples
        self.counts = step.num_scheduled_tokens.astype(np.int32)
        self.computed = step.num_computed_tokens.astype(np.int32)
        self.lengths = self.counts + self.computed
        ends = np.cumsum(self.counts, dtype=np.int32)
        self.starts = ends - self.counts
        self.num_tokens = int(ends[-1]) if len(ends) else 0
        # Outputs that each row has before this step.
        self.num_outputs = self.lengths - rows.num_prompt_tokens[step.rows]
        self._edits = StepEdits(
            rows.edits_of(step.rows, step.samples),
            placed_masks(mask, step.rows, step.samples, rows.vocab_size),
            self.num_outputs,
            rows.vocab_size,
        )

    @property
    def has_prompts(self) -> bool:
        return self.num_tokens != len(self.rows)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence after this step."""
        return int(self.lengths.max(initial=1))

    def flavoured(self, shape: StepShape) -> StepShape:
        """``shape`` with what the settings of rows, and masks, ask of it."""
        wanted = self._rows.num_logprobs[self.rows[self.samples]]
        of_prompts = [table.size for table in self.prompt_tables()]
        return replace(
            shape,
            edited=bool(self._edits),
            num_logprobs=self._table_size(int(wanted.max(initial=-1))),
            num_prompt_logprobs=self._table_size(max(of_prompts, default=-1)),
            words=self._edits.word_sizes(),
            num_biased=self._edits.num_biased(shape.rows),
        )

    def prompt_tables(self) -> Sequence[PromptTable]:
        """What of the prompts' tables the step makes known."""
        rows = self._rows
        sizes = rows.num_prompt_logprobs[self.rows]
        # The last token of a prompt predicts an answer.
        ends = np.minimum(self.lengths, rows.num_prompt_tokens[self.rows] - 1)
        counts = ends - self.computed
        return [
            PromptTable(
                row=int(self.rows[place]),
                start=int(self.starts[place]),
                count=int(counts[place]),
                size=int(sizes[place]),
            )
            for place in np.flatnonzero((sizes >= 0) & (counts > 0)).tolist()
        ]

    def bias(self, shape: StepShape) -> Float32 | None:
        """[E, V], what is added to the logits of ``bias_rows``; None: nothing."""
        return self._edits.bias(shape.num_biased) if shape.num_biased else None

    def fields(self, layout: StepLayout) -> Fields:
        """All fields of ``layout``."""
        shape = layout.shape
        tables = self._rows.tables[self.rows, : shape.blocks]
        fields = {
            **self._token_fields(shape.tokens, layout.block_size),
            "rows": padded_to(self.rows, shape.rows, len(self._rows.tables)),
            "ends": padded_to(self.starts + self.counts - 1, shape.rows, 0),
            "lengths": padded_to(self.lengths, shape.rows, 0),
            "samples": padded_to(self.samples.astype(np.int32), shape.rows, 0),
            "tables": padded_to(tables, shape.rows, 0),
            **self._single_fields(shape),
            **self._piece_fields(shape),
            **self._target_fields(layout),
            **self._rows.sampling_fields(self.rows, self.num_outputs, shape.rows),
        }
        if shape.edited:
            prompts = self._rows.num_prompt_tokens[self.rows]
            fields["prompt_lengths"] = padded_to(prompts, shape.rows, 0)
            fields |= self._edits.fields(shape.rows, shape.num_biased, shape.words)
        return fields

    def _table_size(self, wanted: int) -> int | None:
        return None if wanted < 0 else table_size(wanted, self._rows.vocab_size)

    def _token_fields(self, size: int, block_size: int) -> Fields:
        of = np.repeat(np.arange(len(self.rows)), self.counts)
        positions = np.arange(self.num_tokens, dtype=np.int32) + (self.computed - self.starts)[of]
        token_rows = self.rows[of]
        blocks = self._rows.tables[token_rows, positions // block_size]
        slots = blocks * block_size + positions % block_size
        return {
            "token_rows": padded_to(token_rows, size, len(self._rows.tables)),
            "positions": padded_to(positions, size, 0),
            "slots": padded_to(slots.astype(np.int32), size, -1),
        }

    def _single_fields(self, shape: StepShape) -> Fields:
        is_single = self.counts == 1
        places = np.arange(len(self.rows), dtype=np.int32)
        pieces = np.stack([places, self.computed, is_single.astype(np.int32)], axis=1)
        tokens = np.where(is_single, self.starts, shape.tokens).astype(np.int32)
        return {
            "single_tokens": padded_to(tokens, shape.rows, shape.tokens),
            "single_pieces": padded_to(pieces, shape.rows, 0),
        }

    def _piece_fields(self, shape: StepShape) -> Fields:
        several = np.flatnonzero((self.counts > 1) & shape.has_prompts).astype(np.int32)
        of, number = _cut(-(-self.counts[several] // shape.piece_tokens))
        row, within = several[of], number * shape.piece_tokens
        lengths = np.minimum(self.counts[row] - within, shape.piece_tokens)
        pieces = np.stack([row, self.computed[row] + within, lengths], axis=1)
        return {
            "piece_tokens": padded_to(self.starts[row] + within, shape.num_pieces, 0),
            "pieces": padded_to(pieces.astype(np.int32), shape.num_pieces, 0),
        }

    def _target_fields(self, layout: StepLayout) -> Fields:
        size = layout.block_size
        first = self.computed // size
        of, number = _cut((self.lengths - 1) // size + 1 - first)
        column = first[of] + number
        begin = np.maximum(self.computed[of], column * size)
        end = np.minimum(self.lengths[of], (column + 1) * size)
        block = self._rows.tables[self.rows[of], column]
        targets = np.stack([block, begin - column * size, end - begin], axis=1)
        tokens = self.starts[of] + begin - self.computed[of]
        num_targets = layout.shape.num_targets(size)
        return {
            "targets": padded_to(targets.astype(np.int32), num_targets, 0),
            "target_tokens": padded_to(tokens.astype(np.int32), num_targets, 0),
        }


def _cut(counts: Int32) -> tuple[Int64, Int32]:
    """``counts[i]`` parts of each i: the i of each part, and its number within i."""
    of = np.repeat(np.arange(len(counts)), counts)
    before = np.cumsum(counts) - counts
    return of, (np.arange(len(of)) - before[of]).astype(np.int32)
