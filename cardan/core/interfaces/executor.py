"""The executor tier: whoever runs the steps of one model on one device or group of devices.

The core's own runner implements this over the kernel tier; a platform whose runtime takes whole
steps (a compiler, another framework) implements it itself.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from cardan.core.interfaces.errors import UnsupportedError
from cardan.core.interfaces.kernels import OpTable
from cardan.core.types.kv import KVCacheConfig, KVCacheSpec
from cardan.core.types.model import ModelSummary
from cardan.core.types.step import ModelRunnerOutput, SchedulerOutput

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from cardan.core.interfaces.model import CausalLM


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


class ModelParts(Protocol):
    """What the engine would build the model from, for executors that run the same modules their
    own way. Nothing is imported before it is asked for."""

    def model_class(self, architecture: str) -> "type[CausalLM]":
        """The device-free module of an architecture (``ModelSummary.architecture``).

        Raises:
            PluginError: nobody offers one.
        """

    def ops(self, device: "torch.device") -> OpTable:
        """The operations, for tensors of ``device``, and the platform's kernels for them: what
        ``BuildContext.ops`` takes."""

    def load_weights(self, model: "CausalLM", source: Any) -> LoadReport:
        """Fill a model of ``model_class`` from the ``source`` that ``ModelExecutor.load`` got.

        Raises:
            WeightsError: the checkpoint does not fit the model.
        """


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
        sleep_levels: levels of ``sleep`` that it can.
    """

    features: frozenset[str] = frozenset()
    sleep_levels: Sequence[int] = ()

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
        """Launch the step's first half: apply the plan, run the model.

        Raises:
            OutOfMemoryError: the step does not fit. Its sequences are ended; the next plan frees
                their rows, and the executor goes on. Also of ``sample``.
        """

    @abstractmethod
    def sample(self, step: SchedulerOutput, mask: TokenMask | None = None) -> StepHandle:
        """Launch the second half: masks, sampling, log-probabilities, verification."""

    @abstractmethod
    def close(self) -> None:
        """Free everything. Idempotent."""

    def sleep(self, level: int) -> None:
        """(optional) Give the device's memory back until ``wake``; caches are lost.

        Called with no step in flight and no live row. Level 1 keeps the weights on the host, level
        2 drops them. Default: unsupported.

        Raises:
            OutOfMemoryError: the host cannot keep the weights; all is as before.
        """
        raise UnsupportedError("this executor cannot sleep")

    def wake(self, tags: Sequence[str]) -> Sequence[str]:
        """(optional) Take the memory of ``weights``, of ``kv``, or of both again.

        Returns what still sleeps; when nothing does, steps can run. Default: unsupported.

        Raises:
            OutOfMemoryError: it does not fit now; it can be called again.
        """
        raise UnsupportedError("this executor cannot sleep")
