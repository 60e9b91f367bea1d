"""What a step's program gets of the host: one vector of 32-bit words, cut by static sizes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import jax

Words = npt.NDArray[np.int32]

# Query tokens in a piece of a prompt, at most.
PIECE_TOKENS = 128
# Fields whose words are the bits of float32 numbers.
FLOATS = frozenset({"temperature", "top_p", "min_p", "uniform", "penalties"})


@dataclass(frozen=True, slots=True)
class StepShape:
    """Sizes of a program.

    Attributes:
        tokens: query tokens, padding included.
        rows: rows, padding included; all of them sample.
        blocks: columns of the block tables.
        has_prompts: whether a row may have several tokens; else there is a token for each row.
        edited: whether logits are changed before sampling (``logits_edits``).
        num_logprobs: likeliest tokens in tables of log-probabilities; None: no tables.
        num_prompt_logprobs: the same of tables over the prompts' tokens.
        words: bad words and the longest's tokens, of an edited step.
        num_biased: rows with numbers to be added to their logits, padding included.
    """

    tokens: int
    rows: int
    blocks: int
    has_prompts: bool
    edited: bool = False
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    words: tuple[int, int] = (0, 0)
    num_biased: int = 0

    @property
    def piece_tokens(self) -> int:
        return min(self.tokens, PIECE_TOKENS)

    @property
    def num_pieces(self) -> int:
        """Pieces of prompts. A row of n > 1 tokens has at most 1 + n / piece_tokens."""
        if not self.has_prompts:
            return 0
        return min(self.rows, self.tokens // 2) + self.tokens // self.piece_tokens

    def num_targets(self, block_size: int) -> int:
        """Blocks that the step writes to. A row of n tokens touches at most 1 + n / block_size,
        rounded up, and at most n."""
        if not self.has_prompts:
            return self.rows
        return min(self.tokens, 2 * self.rows + self.tokens // block_size)


class StepLayout:
    """Places of the named fields of a shape.

    T tokens, R rows, P pieces of prompts, N blocks that are written, B columns.

    Attributes of the fields, int32 unless said otherwise:
        token_rows, positions, slots [T]: the permanent row, position in its sequence, and place in
            the cache (-1: padding) of each token.
        rows, ends, lengths, samples [R]: permanent row, last token of the step, tokens of the
            sequence after this step, and whether it yields a token.
        tables [R, B]: block ids.
        single_tokens [R], single_pieces [R, 3]: the token of a row that has but one (T: it has
            several, or is padding); piece as of ``paged_attention``.
        piece_tokens [P], pieces [P, 3]: first token of each piece of a row that has several.
        targets [N, 3], target_tokens [N]: block, first place, number of places that are written,
            and the token that goes to the first.
        top_k [R]; temperature [R] float32, 0: greedy; top_p, min_p, uniform [R] float32.
        prompt_lengths [R], penalties [3, R] float32, words [W, L], word_rows [W], bias_rows [E]:
            of edited steps, as ``logits_edits`` has them.
    """

    def __init__(self, shape: StepShape, block_size: int) -> None:
        self.shape = shape
        self.block_size = block_size

    @cached_property
    def fields(self) -> Mapping[str, tuple[int, ...]]:
        shape = self.shape
        tokens, rows, pieces = (shape.tokens,), (shape.rows,), shape.num_pieces
        targets = shape.num_targets(self.block_size)
        fields: dict[str, tuple[int, ...]] = {
            "token_rows": tokens,
            "positions": tokens,
            "slots": tokens,
            "rows": rows,
            "ends": rows,
            "lengths": rows,
            "samples": rows,
            "tables": (shape.rows, shape.blocks),
            "single_tokens": rows,
            "single_pieces": (shape.rows, 3),
            "piece_tokens": (pieces,),
            "pieces": (pieces, 3),
            "targets": (targets, 3),
            "target_tokens": (targets,),
            "top_k": rows,
            "temperature": rows,
            "top_p": rows,
            "min_p": rows,
            "uniform": rows,
        }
        if shape.edited:
            fields["prompt_lengths"] = rows
            fields["penalties"] = (3, shape.rows)
            fields["words"] = shape.words
            fields["word_rows"] = shape.words[:1]
            fields["bias_rows"] = (shape.num_biased,)
        return fields

    @cached_property
    def size(self) -> int:
        return sum(math.prod(shape) for shape in self.fields.values())

    def packed(self, arrays: Mapping[str, npt.NDArray[Any]]) -> Words:
        """All fields in one vector [size]; float32 numbers go as their bits."""
        words = np.empty(self.size, np.int32)
        offset = 0
        for name, shape in self.fields.items():
            array = arrays[name]
            if array.shape != shape:
                raise ValueError(f"{name} is {list(array.shape)} in a step of {list(shape)}")
            end = offset + array.size
            numbers = array.view(np.int32) if array.dtype == np.float32 else array
            words[offset:end] = numbers.reshape(-1)
            offset = end
        return words

    def unpacked(self, words: "jax.Array") -> "dict[str, jax.Array]":
        """Traced: the fields of a vector; numbers of ``FLOATS`` as float32."""
        import jax
        import jax.numpy as jnp

        fields = {}
        offset = 0
        for name, shape in self.fields.items():
            end = offset + math.prod(shape)
            field = words[offset:end].reshape(shape)
            if name in FLOATS:
                field = jax.lax.bitcast_convert_type(field, jnp.float32)
            fields[name] = field
            offset = end
        return fields
