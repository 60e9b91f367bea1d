"""All sections of an engine's configuration together."""

from dataclasses import dataclass, field, replace
from typing import Any, Self

from cardan.core.config.cache import CacheConfig
from cardan.core.config.device import DeviceConfig
from cardan.core.config.model import ModelConfig
from cardan.core.config.parallel import ParallelConfig
from cardan.core.config.plugins import PluginConfig
from cardan.core.config.scheduler import SchedulerConfig
from cardan.core.types.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything an engine is built from. Never written to: ``with_value`` makes a new one.

    Attributes:
        model: the model section.
        cache: the KV cache section.
        scheduler: the scheduler section.
        device: the device section.
        parallel: the parallel section.
        plugins: the plugin section.
        log_level: level of the engine's own process.
    """

    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    plugins: PluginConfig = field(default_factory=PluginConfig)
    log_level: str = "info"

    def get(self, path: str) -> Any:
        """Value at ``section.name``."""
        section, _, name = path.partition(".")
        try:
            return getattr(getattr(self, section), name)
        except AttributeError:
            raise ConfigError(f"no setting named {path}") from None

    def with_value(self, path: str, value: Any) -> Self:
        """A copy with ``section.name`` replaced."""
        self.get(path)
        section, _, name = path.partition(".")
        return replace(self, **{section: replace(getattr(self, section), **{name: value})})

    def check(self) -> Self:
        """Return self when every single value is in its range, else raise ``ConfigError``."""
        _at_least("cache.block_size", self.cache.block_size, 1)
        _at_least("cache.kv_cache_memory_bytes", self.cache.kv_cache_memory_bytes, 1)
        _at_least("cache.num_blocks", self.cache.num_blocks, 2)
        _at_least("model.max_model_len", self.model.max_model_len, 1)
        _at_least("model.max_logprobs", self.model.max_logprobs, -1)
        _at_least("scheduler.max_num_seqs", self.scheduler.max_num_seqs, 1)
        _at_least("scheduler.max_num_batched_tokens", self.scheduler.max_num_batched_tokens, 1)
        _at_least(
            "scheduler.long_prefill_token_threshold",
            self.scheduler.long_prefill_token_threshold,
            0,
        )
        _at_least(
            "scheduler.mixed_prefill_token_budget", self.scheduler.mixed_prefill_token_budget, 1
        )
        _at_least("scheduler.max_num_queued_reqs", self.scheduler.max_num_queued_reqs, 1)
        _at_least("scheduler.max_num_queued_tokens", self.scheduler.max_num_queued_tokens, 1)
        _at_least("scheduler.async_depth", self.scheduler.async_depth, 0)
        _at_least("device.num_threads", self.device.num_threads, 1)
        _at_least("parallel.tensor_parallel_size", self.parallel.tensor_parallel_size, 1)
        share = self.cache.memory_utilization
        if share is not None and not 0.0 < share <= 1.0:
            raise ConfigError(f"cache.memory_utilization must be in (0, 1], got {share}")
        return self


def _at_least(path: str, value: int | None, low: int) -> None:
    if value is not None and value < low:
        raise ConfigError(f"{path} must be at least {low}, got {value}")
