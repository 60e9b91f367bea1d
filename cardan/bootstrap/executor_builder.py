"""Builds the core's executor on an opened device: the same for every rank of an engine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cardan.bootstrap.model_source import ModelSource, max_model_len
from cardan.bootstrap.quantization import choose_scheme
from cardan.core.config.engine import EngineConfig
from cardan.core.config.fallbacks import chosen
from cardan.core.discovery import MODELS, Discovery
from cardan.core.interfaces.capabilities import DeviceInfo
from cardan.core.interfaces.communication import Communicator
from cardan.core.interfaces.device import Device
from cardan.core.interfaces.errors import PluginError
from cardan.core.interfaces.graphs import ShapePolicy
from cardan.core.interfaces.logits import LogitsProcessor
from cardan.core.interfaces.platform import Platform
from cardan.core.ops.catalogue import CATALOGUE
from cardan.core.ops.reference.attention import ReferenceAttention
from cardan.core.ops.registry import KernelRegistry
from cardan.core.plugin_manager import PluginManager
from cardan.core.runner.kernel_executor import ExecutorParts, KernelExecutor
from cardan.core.runner.model_runner import PromptLogitsObserver
from cardan.core.types.model import ModelSummary
from cardan.core.weights.checkpoint import Checkpoint
from cardan.core.weights.dummy_checkpoint import DummyCheckpoint
from cardan.core.weights.gguf_checkpoint import GGUFCheckpoint
from cardan.core.weights.hf_checkpoint import HFCheckpoint


@dataclass(frozen=True, slots=True)
class ExecutorBuilder:
    """What an executor is made from; ``config`` is solved and ``device`` open."""

    platform: Platform
    info: DeviceInfo
    config: EngineConfig
    discovery: Discovery
    plugins: PluginManager
    source: ModelSource
    device: Device

    def summary(self) -> ModelSummary:
        config = self.source.config
        return ModelSummary(
            architecture=self.source.architecture,
            vocab_size=int(config["vocab_size"]),
            hidden_size=int(config["hidden_size"]),
            num_layers=int(config["num_hidden_layers"]),
            max_model_len=max_model_len(self.config.model, self.source),
            dtype=self.config.model.dtype,
            config=config,
        )

    def kernel_executor(
        self,
        summary: ModelSummary,
        *,
        processors: Sequence[LogitsProcessor] = (),
        prompt_logits: PromptLogitsObserver | None = None,
        communicator: Communicator | None = None,
    ) -> KernelExecutor:
        """The core's own runner; ``communicator`` joins the ranks where there are several.

        Raises:
            PluginError: the device has no torch device.
        """
        torch_device = self.device.torch_device
        if torch_device is None:
            raise PluginError(
                f"platform {self.platform.name} offers neither a torch device nor an executor"
            )
        shapes = self.platform.shapes(summary, self.info)
        ops = KernelRegistry(
            (*CATALOGUE, *self.plugins.ops()),
            (*self.platform.kernels(self.info), *self.plugins.kernels()),
            device=torch_device,
            features=self.platform.capabilities(self.info).instruction_sets,
            pins=self.config.device.kernels,
            strict=self.config.device.strict_kernels,
        )
        return KernelExecutor(
            ExecutorParts(
                device=self.device,
                config=self.config,
                model_class=self.discovery.load(MODELS, summary.architecture),
                ops=ops,
                attention=(*self.platform.attention(self.info), ReferenceAttention),
                shapes=shapes,
                max_step_tokens=self.max_step_tokens(shapes),
                processors=processors,
                quantization=choose_scheme(self.config.model, self.source, self.discovery),
                prompt_logits=prompt_logits,
                communicator=communicator,
            )
        )

    def max_step_tokens(self, shapes: ShapePolicy) -> int:
        """Tokens of the largest step."""
        budget = chosen(
            self.config.scheduler.max_num_batched_tokens, "scheduler.max_num_batched_tokens"
        )
        if shapes.strict and shapes.token_buckets:
            return min(budget, shapes.token_buckets[-1])
        return budget

    def open_weights(self, shapes: Mapping[str, tuple[int, ...]]) -> Checkpoint:
        """The checkpoint; ``shapes`` are what the model wants of it."""
        files = self.source.files
        if self.config.model.load_format == "dummy":
            return DummyCheckpoint(self.source.config, shapes, self.config.model.seed or 0)
        if files.gguf is not None:
            return GGUFCheckpoint(files.gguf)
        return HFCheckpoint(files.path)
