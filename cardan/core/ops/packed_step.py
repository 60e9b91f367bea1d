"""How one step is laid out in the words that go to the device in a single copy."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]

# Fields of a row before those of its KV groups, in the order of the attributes.
NUM_ROW_FIELDS = 6
NUM_GROUP_FIELDS = 3


class StepSizes(NamedTuple):
    """What the host knows of a step.

    Attributes:
        rows, tokens, samples: of the step itself; each row has a token at least.
        padded_rows, padded_tokens: of its tensors.
        num_blocks: columns of the block tables among these.
        block_size: tokens in a block.
        new_tokens, new_blocks: words that come with the step, in all rows and KV groups.
    """

    rows: int
    tokens: int
    samples: int
    padded_rows: int
    padded_tokens: int
    num_blocks: int
    block_size: int
    new_tokens: int
    new_blocks: int


class PackedStep:
    """Named views of the words of a step of R rows and S samples. Owns no memory.

    Only the first R entries of a field (R + 1 of ``starts``, S of ``samples``) have a meaning.

    Attributes:
        rows: the permanent row of each row of the step; all distinct.
        starts: prefix sum of the tokens that the rows compute, from 0 on.
        computed: tokens of each row that were computed before.
        samples: places in the step of the rows that sample, ascending.
        fresh_counts: tokens that come with this step for a row that is new, from its position 0 on;
            0 for other rows.
        fresh_offsets: the word that holds the first of them.
        block_first, block_end: [G, ...] columns of a row's block table that come with this step:
            from the first up to but not including the end.
        block_offsets: [G, ...] the word that holds the first of them.
        staged: the words of those tokens and block ids, one behind the other: the tokens in the
            order of their rows, then the blocks of each group in that order.
        staged_at: the word that ``staged`` begins with.
    """

    def __init__(self, words: Int32, num_groups: int, num_columns: int) -> None:
        """``num_columns``: size of a field."""
        self.staged_at = first_staged_word(num_groups, num_columns)
        fields = words[: self.staged_at].reshape(-1, num_columns)
        self.rows, self.starts, self.computed = fields[0], fields[1], fields[2]
        self.samples, self.fresh_counts, self.fresh_offsets = fields[3], fields[4], fields[5]
        of_groups = fields[NUM_ROW_FIELDS:].reshape(NUM_GROUP_FIELDS, num_groups, num_columns)
        self.block_first, self.block_end, self.block_offsets = of_groups
        self.staged = words[self.staged_at :]


def first_staged_word(num_groups: int, num_columns: int) -> int:
    return (NUM_ROW_FIELDS + NUM_GROUP_FIELDS * num_groups) * num_columns
