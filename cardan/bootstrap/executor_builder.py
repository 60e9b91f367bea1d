"""Builds the core's executor on an opened device: the same for every rank of an engine."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from cardan.bootstrap.model_source import ModelSource, gguf_plugin, max_model_len
from cardan.bootstrap.quantization import choose_scheme
from cardan.core.config.engine import EngineConfig
from cardan.core.config.fallbacks import chosen
from cardan.core.discovery import MODELS, Discovery
from cardan.core.interfaces.capabilities import DeviceInfo
from cardan.core.interfaces.communication import Communicator
from cardan.core.interfaces.device import Device
from cardan.core.interfaces.errors import PluginError
from cardan.core.interfaces.executor import LoadReport
from cardan.core.interfaces.graphs import ShapePolicy
from cardan.core.interfaces.logits import LogitsProcessor
from cardan.core.interfaces.model import CausalLM
from cardan.core.interfaces.platform import Platform
from cardan.core.ops.catalogue import CATALOGUE
from cardan.core.ops.reference.attention import ReferenceAttention
from cardan.core.ops.registry import KernelRegistry
from cardan.core.plugin_manager import PluginManager
from cardan.core.runner.kernel_executor import ExecutorParts, KernelExecutor, WeightSource
from cardan.core.runner.model_runner import PromptLogitsObserver
from cardan.core.types.model import ModelSummary
from cardan.core.weights.checkpoint import Checkpoint
from cardan.core.weights.dummy_checkpoint import DummyCheckpoint
from cardan.core.weights.gguf_checkpoint import GGUFCheckpoint
from cardan.core.weights.hf_checkpoint import HFCheckpoint
from cardan.core.weights.loader import load_weights
from cardan.core.weights.progress import LoadProgress


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

    def model_class(self, architecture: str) -> type[CausalLM]:
        """See ``ModelParts``; this is one."""
        model: type[CausalLM] = self.discovery.load(MODELS, architecture)
        return model

    def load_weights(self, model: CausalLM, source: WeightSource) -> LoadReport:
        """See ``ModelParts``."""
        began = time.monotonic()
        checkpoint = source({slot.name: slot.shape for slot in model.weight_slots()})
        try:
            num_bytes = load_weights(model, checkpoint, LoadProgress(self.source.architecture))
        finally:
            checkpoint.close()
        return LoadReport(num_bytes, {"load_weights": time.monotonic() - began})

    def kernels(self) -> KernelRegistry:
        """The operations and all kernels for the device.

        Raises:
            PluginError: the device has no torch device.
        """
        device = self.device.torch_device
        if device is None:
            raise PluginError(
                f"platform {self.platform.name} offers neither a torch device nor an executor"
            )
        return self.ops(device)

    def ops(self, device: torch.device) -> KernelRegistry:
        """The operations and all kernels for tensors of ``device``."""
        capabilities = self.platform.capabilities(self.info)
        return KernelRegistry(
            (*CATALOGUE, *self.plugins.ops()),
            (
                *self.platform.kernels(self.info),
                *self.plugins.kernels(self.platform.name, self.info),
            ),
            device=device,
            features=capabilities.instruction_sets,
            float64=capabilities.float64,
            pins=self.config.device.kernels,
            strict=self.config.device.strict_kernels,
        )

    def kernel_executor(
        self,
        summary: ModelSummary,
        ops: KernelRegistry,
        *,
        processors: Sequence[LogitsProcessor] = (),
        prompt_logits: PromptLogitsObserver | None = None,
        communicator: Communicator | None = None,
    ) -> KernelExecutor:
        """The core's own runner; ``communicator`` joins the ranks where there are several."""
        shapes = self.platform.shapes(summary, self.info)
        return KernelExecutor(
            ExecutorParts(
                device=self.device,
                config=self.config,
                model_class=self.model_class(summary.architecture),
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
            seed = self.config.model.seed or 0
            return DummyCheckpoint(self.source.config, shapes, seed, self.device.torch_device)
        if files.gguf is not None:
            return GGUFCheckpoint(files.gguf, gguf_plugin)
        return HFCheckpoint(files.path)
