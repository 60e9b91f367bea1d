"""What an engine tells its clients about itself once it is ready."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Facts of a ready engine.

    ``startup_seconds`` has the phases of the start by name. ``logits_processors`` are the names
    of active plugins. ``cache_config`` is what the metric ``cache_config_info`` shows.
    """

    model: str
    architecture: str
    platform: str
    device: str
    dtype: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_logprobs: int
    block_size: int
    num_blocks: int
    kv_cache_bytes: int
    weight_bytes: int
    startup_seconds: dict[str, float] = field(default_factory=dict)
    features: tuple[str, ...] = ()
    generation_config: dict[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    pid: int = 0


EngineState = Literal["starting", "ready", "unhealthy", "draining", "stuck", "dead"]


@dataclass(frozen=True, slots=True)
class PluginReport:
    """What plugins last said of their engine: gauges by plugin and name, and why it is unhealthy,
    each reason with the plugin's name before it."""

    gauges: dict[str, dict[str, float]] = field(default_factory=dict)
    complaints: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """``reason`` says why an engine is not ready, ``num_restarts`` how often it was replaced.

    An engine is ``unhealthy`` when a plugin says so; it goes on.
    """

    state: EngineState
    reason: str = ""
    last_step_age: float = 0.0
    num_restarts: int = 0
    plugin_gauges: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def is_serving(self) -> bool:
        return self.state == "ready"


def running_health(step_age: float, plugins: PluginReport) -> EngineHealth:
    """The health of an engine that works, as far as the core can tell."""
    if plugins.complaints:
        reason = "; ".join(plugins.complaints)
        return EngineHealth("unhealthy", reason, step_age, plugin_gauges=plugins.gauges)
    return EngineHealth("ready", "", step_age, plugin_gauges=plugins.gauges)
