"""From layers and a byte budget to groups of blocks."""

from collections.abc import Sequence

from cardan.core.types.errors import ConfigError
from cardan.core.types.kv import KVCacheConfig, KVCacheGroup, KVCacheSpec


def group_layers(specs: Sequence[KVCacheSpec]) -> tuple[KVCacheGroup, ...]:
    """Layers with equal specs share a group, in order of first appearance."""
    layers: dict[KVCacheSpec, list[int]] = {}
    for index, spec in enumerate(specs):
        layers.setdefault(spec, []).append(index)
    return tuple(KVCacheGroup(tuple(members), spec) for spec, members in layers.items())


def format_bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def size_cache(
    specs: Sequence[KVCacheSpec], budget_bytes: int, num_blocks: int | None, most_tokens: int
) -> KVCacheConfig:
    """Cut ``budget_bytes`` into blocks, no more than ``most_tokens`` can ever use.

    ``num_blocks`` overrides the budget.

    Raises:
        ConfigError: not even two blocks fit.
    """
    groups = group_layers(specs)
    block_bytes = sum(group.bytes_per_block for group in groups)
    block_size = groups[0].spec.block_size
    if num_blocks is None:
        useful = -(-most_tokens // block_size) + 1
        num_blocks = min(budget_bytes // block_bytes, useful)
    if num_blocks < 2:
        raise ConfigError(
            f"no room for a KV cache: one block of {block_size} tokens needs "
            f"{format_bytes(block_bytes)} (two at least), available are "
            f"{format_bytes(budget_bytes)}. Remedies: raise --kv-cache-memory-bytes or "
            "--memory-utilization, lower --max-num-batched-tokens or --max-num-seqs (steps take "
            "memory, too), free memory, or choose a smaller model or --dtype"
        )
    return KVCacheConfig(groups, int(num_blocks))


def fit_model_len(config: KVCacheConfig, wanted: int, explicit: bool) -> tuple[int, str | None]:
    """The longest context that one request can have, and a warning when it had to shrink.

    Admission can always finish what it starts only if a request of full length fits alone.

    Raises:
        ConfigError: the user named a length that does not fit.
    """
    if wanted <= config.num_tokens:
        return wanted, None
    block_bytes = sum(group.bytes_per_block for group in config.groups)
    needed = (-(-wanted // config.block_size) + 1) * block_bytes
    facts = (
        f"a context of {wanted} tokens needs a KV cache of {format_bytes(needed)}, available are "
        f"{format_bytes(config.num_bytes)} ({config.num_tokens} tokens)"
    )
    if explicit:
        raise ConfigError(
            f"{facts}. Remedies: --max-model-len {config.num_tokens} or less, a larger "
            "--kv-cache-memory-bytes or --memory-utilization, a smaller --kv-cache-dtype, or lower "
            "--max-num-batched-tokens or --max-num-seqs (steps take memory, too)"
        )
    return config.num_tokens, f"{facts}; the context is limited to {config.num_tokens} tokens"
