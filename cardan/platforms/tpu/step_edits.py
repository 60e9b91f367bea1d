"""What the rows of one step do to their logits, as arrays. Only rows that do something cost."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cardan.core.interfaces.executor import TokenMask
from cardan.core.types.step import Float32, Int32
from cardan.platforms.tpu.buckets import rounded_up
from cardan.platforms.tpu.row_edits import ANY_TOKEN, RowEdits


class StepEdits:
    """Edits of the rows that sample.

    ``edits``: place of a row in the step, and what it does now; ``masks``: place of a row, and its
    allowed tokens as bits (``TokenMask``).
    """

    def __init__(
        self,
        edits: Sequence[tuple[int, RowEdits]],
        masks: Sequence[tuple[int, Int32]],
        num_outputs: Int32,
        vocab_size: int,
    ) -> None:
        """``num_outputs`` [R]: of each row before this step."""
        self._num_outputs = num_outputs
        self._vocab_size = vocab_size
        self._edits = [(place, item) for place, item in edits if item.acts(num_outputs[place])]
        self._masks = masks
        biased = {place for place, item in self._edits if item.has_bias(num_outputs[place])}
        self._biased = sorted(biased | {place for place, _ in masks})

    def __bool__(self) -> bool:
        return bool(self._edits or self._masks)

    def num_biased(self, num_rows: int) -> int:
        """Rows of ``bias`` in a step of ``num_rows``, padding included: none, few, or all."""
        few = min(8, num_rows)
        if not self._biased:
            return 0
        return few if len(self._biased) <= few else num_rows

    def word_sizes(self) -> tuple[int, int]:
        """Words and tokens of the longest, both rounded up; (0, 0): no words."""
        sizes = [item.words.shape for _, item in self._edits if len(item.words)]
        if not sizes:
            return (0, 0)
        counts, lengths = zip(*sizes, strict=True)
        return (rounded_up(sum(counts)), rounded_up(max(lengths)))

    def fields(
        self, num_rows: int, num_biased: int, sizes: tuple[int, int]
    ) -> dict[str, npt.NDArray[np.generic]]:
        """``penalties``, ``words``, ``word_rows``, ``bias_rows`` of a step of ``num_rows``, with
        words of ``sizes``."""
        penalties = np.zeros((3, num_rows), np.float32)
        penalties[0] = 1.0
        words = np.full(sizes, ANY_TOKEN, np.int32)
        word_rows = np.full(sizes[:1], num_rows, np.int32)
        bias_rows = np.full(num_biased, num_rows, np.int32)
        bias_rows[: len(self._biased)] = self._biased
        used = 0
        for place, item in self._edits:
            penalties[:, place] = item.penalties
            count, length = item.words.shape
            if count:
                words[used : used + count, -length:] = item.words
                word_rows[used : used + count] = place
                used += count
        return {
            "penalties": penalties,
            "words": words,
            "word_rows": word_rows,
            "bias_rows": bias_rows,
        }

    def bias(self, num_biased: int) -> Float32:
        """[num_biased, V]: what is added to the logits of ``bias_rows``."""
        bias = np.zeros((num_biased, self._vocab_size), np.float32)
        at = {place: index for index, place in enumerate(self._biased)}
        for place, item in self._edits:
            if item.bias is not None:
                bias[at[place]] = item.bias
            if self._num_outputs[place] < item.min_tokens:
                bias[at[place], item.stops] = -np.inf
        for place, bits in self._masks:
            allowed = np.unpackbits(bits.view(np.uint8), bitorder="little")[: self._vocab_size]
            bias[at[place], allowed == 0] = -np.inf
        return bias


def placed_masks(
    mask: TokenMask | None, rows: Int32, samples: npt.NDArray[np.bool_], vocab_size: int
) -> list[tuple[int, Int32]]:
    """The masks of a step with these permanent rows.

    Raises:
        ValueError: a row that does not sample in the step, or bits for another vocabulary.
    """
    if mask is None:
        return []
    wanted = (len(mask.rows), -(-vocab_size // 32))
    if mask.bits.shape != wanted:
        raise ValueError(f"mask bits must be {list(wanted)}, got {list(mask.bits.shape)}")
    places = {int(rows[place]): place for place in np.flatnonzero(samples).tolist()}
    strangers = [row for row in mask.rows if int(row) not in places]
    if strangers:
        raise ValueError(f"mask rows {strangers} are not among those that sample in this step")
    bits = np.ascontiguousarray(mask.bits, np.int32)
    return [(places[int(row)], bits[index]) for index, row in enumerate(mask.rows)]
