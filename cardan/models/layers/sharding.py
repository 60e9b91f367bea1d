"""Which part of a weight a rank holds under tensor parallelism."""

from dataclasses import dataclass

from cardan.core.interfaces.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Span:
    """``size`` consecutive rows or columns from ``start`` on."""

    start: int
    size: int

    @property
    def stop(self) -> int:
        return self.start + self.size


def even_span(what: str, total: int, rank: int, world_size: int) -> Span:
    """This rank's equal share of ``total``.

    Raises:
        ConfigError: ranks cannot have equal shares.
    """
    if total % world_size:
        raise ConfigError(
            f"tensor_parallel_size is {world_size}, which does not divide {what} ({total}); "
            f"use a divisor of {total}"
        )
    size = total // world_size
    return Span(rank * size, size)


def kv_head_span(num_kv_heads: int, rank: int, world_size: int) -> Span:
    """This rank's key-value heads; with more ranks than heads, several ranks hold the same one.

    Raises:
        ConfigError: neither count divides the other.
    """
    if num_kv_heads >= world_size:
        return even_span("num_key_value_heads", num_kv_heads, rank, world_size)
    if world_size % num_kv_heads:
        raise ConfigError(
            f"tensor_parallel_size is {world_size}, which is not a multiple of num_key_value_heads "
            f"({num_kv_heads}); use a multiple or a divisor of {num_kv_heads}"
        )
    return Span(rank * num_kv_heads // world_size, 1)


def vocab_span(vocab_size: int, rank: int, world_size: int) -> tuple[Span, int]:
    """This rank's vocabulary rows, and how many rows every rank allocates.

    Ranks allocate equally many, so the last ones may hold fewer (or no) real rows.
    """
    allocated = -(-vocab_size // world_size)
    start = min(rank * allocated, vocab_size)
    return Span(start, min(allocated, vocab_size - start)), allocated
