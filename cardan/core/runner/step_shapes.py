"""The padded sizes of steps: one decision for buffers, captured graphs and compiled programs."""

from dataclasses import dataclass

from cardan.core.interfaces.capabilities import GraphSupport
from cardan.core.interfaces.graphs import ShapePolicy
from cardan.core.types.step import SchedulerOutput


@dataclass(frozen=True, slots=True, order=True)
class StepShape:
    """Tokens, rows and width of the block tables (blocks) of a step, padding included.

    ``is_decode``: each row has at most one token. A captured shape says so because kernels may
    be chosen by it.
    """

    num_tokens: int
    num_rows: int
    num_blocks: int
    is_decode: bool


@dataclass(frozen=True, slots=True)
class StepShapes:
    """Maps steps to shapes.

    Without graphs a shape is what the platform's policy makes of the step. With them decode steps
    are padded by their rows alone, and, where the device captures any step (``full``), mixed
    steps by their tokens alone: their rows and block tables are as large as they get. So there
    are few shapes to capture, and each step that fits one has just that shape. A policy without
    ``kv_len_buckets`` means that the width costs nothing: captured tables have their full width.

    Attributes:
        policy: the platform's buckets.
        graphs: what is captured.
        max_num_tokens, max_num_rows: largest step before padding.
        max_num_blocks: width of a row's block table.
        block_size: tokens in a block.
    """

    policy: ShapePolicy
    graphs: GraphSupport
    max_num_tokens: int
    max_num_rows: int
    max_num_blocks: int
    block_size: int

    @property
    def is_lazy(self) -> bool:
        """Whether decode shapes are captured when they first occur."""
        return self.policy.lazy and self.graphs != "none"

    @property
    def buffer_sizes(self) -> tuple[int, int]:
        """Tokens and rows of the largest step, padding included."""
        rows = max(self.max_num_rows, self.policy.padded_sequences(self.max_num_rows))
        tokens = max(self.max_num_tokens, rows)
        return max(tokens, self.policy.padded_tokens(tokens)), rows

    def of(self, plan: SchedulerOutput) -> StepShape:
        num_rows, num_tokens = len(plan.rows), plan.num_tokens
        seq_lens = plan.num_computed_tokens + plan.num_scheduled_tokens
        if num_rows == num_tokens:
            return self._decode(num_rows, int(seq_lens.max()))
        buckets = self.policy.token_buckets
        if self.graphs == "full" and buckets and num_tokens <= buckets[-1]:
            return self._mixed(num_tokens)
        return StepShape(
            self.policy.padded_tokens(num_tokens),
            self.policy.padded_sequences(num_rows),
            self._width(int(seq_lens.max())),
            is_decode=False,
        )

    def num_logit_rows(self, num_samples: int) -> int:
        """Rows of hidden states that logits are made of."""
        return self.policy.padded_sequences(num_samples) if self.policy.strict else num_samples

    def captured(self) -> list[StepShape]:
        """The shapes to capture, largest first."""
        if self.graphs == "none" or self.is_lazy:
            return []
        most = self.policy.padded_sequences(self.max_num_rows)
        kv_lens = (*self.policy.kv_len_buckets, self.max_num_blocks * self.block_size)
        shapes = {
            self._decode(rows, kv_len)
            for rows in self.policy.sequence_buckets
            for kv_len in kv_lens
            if rows <= most
        }
        if self.graphs == "full":
            largest = self.policy.padded_tokens(self.max_num_tokens)
            buckets = self.policy.token_buckets
            shapes |= {self._mixed(tokens) for tokens in buckets if 1 < tokens <= largest}
        return sorted(shapes, reverse=True)

    def _decode(self, num_rows: int, kv_len: int) -> StepShape:
        rows = self.policy.padded_sequences(num_rows)
        return StepShape(self.policy.padded_tokens(rows), rows, self._width(kv_len), is_decode=True)

    def _mixed(self, num_tokens: int) -> StepShape:
        rows = self.policy.padded_sequences(self.max_num_rows)
        tokens = self.policy.padded_tokens(num_tokens)
        return StepShape(tokens, rows, self.max_num_blocks, is_decode=False)

    def _width(self, kv_len: int) -> int:
        buckets = self.policy.kv_len_buckets
        if not buckets and self.graphs != "none":
            return self.max_num_blocks
        if buckets and kv_len > buckets[-1]:
            return self.max_num_blocks
        blocks = -(-self.policy.padded_kv_len(kv_len) // self.block_size)
        return min(blocks, self.max_num_blocks)
