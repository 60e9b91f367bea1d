"""What an engine tells its clients about itself once it is ready."""

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


EngineState = Literal["starting", "ready", "draining", "stuck", "dead"]


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """``reason`` says why an engine is not ready, ``num_restarts`` how often it was replaced."""

    state: EngineState
    reason: str = ""
    last_step_age: float = 0.0
    num_restarts: int = 0

    @property
    def is_serving(self) -> bool:
        return self.state == "ready"
