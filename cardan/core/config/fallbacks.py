"""What the engine takes for settings that neither the user nor anybody else has chosen."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeVar

from cardan.core.config.engine import EngineConfig

Value = TypeVar("Value")

# The only place of these values. Each setting here is None until it is chosen, so that a platform
# may prefer another value and whatever a user says is told apart from what nobody said.
FALLBACKS: Mapping[str, int | float | bool] = MappingProxyType(
    {
        "cache.block_size": 16,
        "cache.memory_utilization": 0.4,
        "cache.enable_prefix_caching": True,
        "scheduler.max_num_seqs": 128,
        "scheduler.max_num_batched_tokens": 2048,
        "scheduler.enable_chunked_prefill": True,
        "scheduler.long_prefill_token_threshold": 0,
        "device.enforce_eager": False,
    }
)


def with_fallbacks(config: EngineConfig) -> EngineConfig:
    """``config`` with the engine's own values for what is still open."""
    for path, value in FALLBACKS.items():
        if config.get(path) is None:
            config = config.with_value(path, value)
    return config


def chosen(value: Value | None, path: str) -> Value:
    """``value`` of the setting ``path`` in a configuration that was solved.

    Raises:
        RuntimeError: it is open, so the configuration was not solved.
    """
    if value is None:
        raise RuntimeError(f"{path} is open; solve the configuration before it is used")
    return value
