"""Which shapes steps have: few, since each is a program of its own."""

from collections.abc import Sequence
from dataclasses import replace

from cardan.core.interfaces.graphs import ShapePolicy
from cardan.platforms.tpu.step_layout import StepShape

# Each size is four times the one before: at most that much of a step is padding, and a model of
# 8192 tokens has about forty programs.
_TOKENS = (16, 64, 256, 1024, 4096)
_ROWS = (8, 32, 128, 512)
_KV_LENS = (256, 1024, 4096, 16384, 65536, 262144)


def step_policy(max_model_len: int) -> ShapePolicy:
    """The buckets of a model with sequences of at most ``max_model_len`` tokens."""
    within = tuple(length for length in _KV_LENS if length < max_model_len)
    return ShapePolicy(
        token_buckets=_TOKENS,
        sequence_buckets=_ROWS,
        kv_len_buckets=(*within, max_model_len),
        strict=True,
    )


def rounded_up(number: int) -> int:
    """The next of 8, 32, 128, 512, ...: sizes of what few requests want."""
    size = 8
    while size < number:
        size *= 4
    return size


def table_size(wanted: int, vocab_size: int) -> int:
    """Likeliest tokens in a program's table where ``wanted`` are (-1: all)."""
    return vocab_size if wanted == -1 else min(rounded_up(wanted), vocab_size)


def demanding(shape: StepShape, num_logprobs: int) -> StepShape:
    """The shape where requests ask for everything, tables of ``num_logprobs`` among it."""
    return replace(
        shape,
        edited=True,
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_logprobs,
        words=(rounded_up(1), rounded_up(1)),
        num_biased=shape.rows,
    )


class StepBuckets:
    """The shapes of one engine's steps."""

    def __init__(
        self, policy: ShapePolicy, max_rows: int, max_tokens: int, block_size: int
    ) -> None:
        """``max_rows`` and ``max_tokens``: of any step."""
        self._policy = policy
        self._max_rows = max_rows
        self._max_tokens = max_tokens
        self._block_size = block_size

    def shape(self, num_tokens: int, num_rows: int, longest: int, has_prompts: bool) -> StepShape:
        """The smallest shape that holds a step whose longest sequence has ``longest`` tokens."""
        rows = min(self._policy.padded_sequences(num_rows), self._max_rows)
        tokens = min(self._policy.padded_tokens(num_tokens), self._max_tokens)
        # With prompts, rows are few beside tokens.
        tokens = max(tokens, rows) if has_prompts else rows
        blocks = -(-self._policy.padded_kv_len(longest) // self._block_size)
        return StepShape(tokens, rows, blocks, has_prompts)

    def usual(self) -> Sequence[StepShape]:
        """All shapes that steps of plain requests can have."""
        rows = _up_to(self._policy.sequence_buckets, self._max_rows)
        tokens = _up_to(self._policy.token_buckets, self._max_tokens)
        shapes: dict[StepShape, None] = {}
        for length in self._policy.kv_len_buckets:
            for num_rows in rows:
                shapes[self.shape(num_rows, num_rows, length, False)] = None
                for num_tokens in tokens:
                    if num_tokens >= num_rows or num_rows == rows[0]:
                        shapes[self.shape(num_tokens, num_rows, length, True)] = None
        return list(shapes)


def _up_to(buckets: Sequence[int], most: int) -> tuple[int, ...]:
    """The buckets that sizes up to ``most`` fall into."""
    return (*(size for size in buckets if size < most), most)
