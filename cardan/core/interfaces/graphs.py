"""Shape buckets and captured work: one concept for graphs, compiled programs and recorded steps."""

from abc import ABC, abstractmethod
from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ShapePolicy:
    """The shapes that a device wants to see.

    Empty buckets mean any size. ``strict`` devices compile for each shape, so the scheduler never
    exceeds the largest bucket; others fall back to eager execution above it. Padding tokens have
    slot -1 and padding rows no query token. ``kv_len_buckets`` bound the block table's width.
    ``lazy``: shapes are captured when a step first has them, not at start; for devices on which
    that costs no more than a step, so that they need no padding.
    """

    token_buckets: tuple[int, ...] = ()
    sequence_buckets: tuple[int, ...] = ()
    kv_len_buckets: tuple[int, ...] = ()
    strict: bool = False
    lazy: bool = False

    def padded_tokens(self, num_tokens: int) -> int:
        return _padded(self.token_buckets, num_tokens)

    def padded_sequences(self, num_sequences: int) -> int:
        return _padded(self.sequence_buckets, num_sequences)

    def padded_kv_len(self, kv_len: int) -> int:
        return _padded(self.kv_len_buckets, kv_len)


def _padded(buckets: tuple[int, ...], size: int) -> int:
    index = bisect_left(buckets, size)
    return buckets[index] if index < len(buckets) else size


class Graph(ABC):
    """Captured device work that reads and writes fixed addresses."""

    @abstractmethod
    def replay(self) -> None:
        """Launch the work again on the current stream; does not wait."""

    @abstractmethod
    def release(self) -> None:
        """Give the memory back. The graph is not replayed afterwards."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Device memory held by this graph, bytes; an estimate where the device cannot tell."""
