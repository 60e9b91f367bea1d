"""The executor tier: whoever runs the steps of one model on one device or group of devices.

The core's own runner implements this over the kernel tier; a platform whose runtime takes whole
steps (a compiler, another framework) implements it itself.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cardan.core.types.kv import KVCacheConfig, KVCacheSpec
from cardan.core.types.model import ModelSummary
from cardan.core.types.step import ModelRunnerOutput, SchedulerOutput

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What loading brought: bytes of weights, and seconds for each phase by name."""

    weight_bytes: int
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WarmupReport:
    """What was captured or compiled ahead, and the bytes that it holds."""

    num_graphs: int = 0
    graph_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class TokenMask:
    """Allowed tokens for some sampling rows: bit t of ``bits`` [n, ceil(vocab / 32)] int32."""

    rows: Sequence[int]
    bits: "npt.NDArray[np.int32]"


class StepHandle(ABC):
    """A step in flight."""

    @abstractmethod
    def done(self) -> bool:
        """Whether ``result`` would not block."""

    @abstractmethod
    def result(self) -> ModelRunnerOutput:
        """Wait for and return the result; call once."""


class ModelExecutor(ABC):
    """Runs steps. One thread calls it: load, kv_specs, bind_kv, warmup, steps, close.

    Attributes:
        features: what it honours besides plain steps (``token_mask``, ``prompt_logprobs``,
            ``lora``, ``speculation``, ``logits_processors``). It must reject a request that needs
            more, never ignore it; the core asks before admission.
    """

    features: frozenset[str] = frozenset()

    @abstractmethod
    def load(self, model: ModelSummary, source: Any) -> LoadReport:
        """Build the model and load its weights.

        ``source`` maps the wanted names and shapes to an open checkpoint: an object with
        ``tensor(name)``, ``shape(name)`` and ``close()``, which this method closes.
        """

    @abstractmethod
    def kv_specs(self) -> Sequence[KVCacheSpec]:
        """What each layer keeps in the KV cache, in layer order."""

    @abstractmethod
    def available_kv_bytes(self, utilization: float) -> int:
        """Bytes that KV pools may take: ``utilization`` of what is free at the peak of a step."""

    @abstractmethod
    def bind_kv(self, config: KVCacheConfig) -> None:
        """Allocate the pools."""

    @abstractmethod
    def warmup(self) -> WarmupReport:
        """Capture, compile or touch what steady steps will use."""

    @abstractmethod
    def forward(self, step: SchedulerOutput) -> None:
        """Launch the step's first half: apply the plan, run the model."""

    @abstractmethod
    def sample(self, step: SchedulerOutput, mask: TokenMask | None = None) -> StepHandle:
        """Launch the second half: masks, sampling, log-probabilities, verification."""

    @abstractmethod
    def close(self) -> None:
        """Free everything. Idempotent."""
