"""The kernel tier's executor: the core's own runner on a torch device."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from cardan.core.config.engine import EngineConfig
from cardan.core.config.fallbacks import chosen
from cardan.core.interfaces.attention import AttentionBackend
from cardan.core.interfaces.capabilities import GraphSupport
from cardan.core.interfaces.communication import Communicator
from cardan.core.interfaces.device import Device
from cardan.core.interfaces.errors import ConfigError, OutOfMemoryError, UnsupportedError
from cardan.core.interfaces.executor import (
    LoadReport,
    ModelExecutor,
    StepHandle,
    TokenMask,
    WarmupReport,
)
from cardan.core.interfaces.graphs import ShapePolicy
from cardan.core.interfaces.logits import LogitsProcessor
from cardan.core.interfaces.memory import KVPool
from cardan.core.interfaces.model import BuildContext, CausalLM
from cardan.core.interfaces.quantization import QuantScheme
from cardan.core.kvcache.sizing import format_bytes, group_layers
from cardan.core.ops.registry import KernelRegistry
from cardan.core.runner.attention_binding import (
    AttentionChoice,
    BoundLayers,
    PoolMaker,
    bind_layers,
)
from cardan.core.runner.block_tables import BlockTables
from cardan.core.runner.executor_sleep import KEEP_WEIGHTS, ExecutorSleep
from cardan.core.runner.host_input_batch import HostInputBatch
from cardan.core.runner.input_batch import InputBatch
from cardan.core.runner.memory_errors import (
    REMEDIES,
    largest_step_fits,
    rebinding_fits,
    step_fits,
    weights_fit,
)
from cardan.core.runner.model_runner import ModelRunner, PromptLogitsObserver
from cardan.core.runner.rank_sampler import RankSampler
from cardan.core.runner.rehearsal import (
    StepLimits,
    StepMemory,
    largest_step,
    longest_prompt,
    null_pool,
)
from cardan.core.runner.request_states import RequestStates
from cardan.core.runner.step_buffers import StepBuffers
from cardan.core.runner.step_shapes import StepShapes
from cardan.core.sampling.sampler import Sampler
from cardan.core.sampling.sampling_states import SamplingStates
from cardan.core.types.kv import NULL_BLOCK, KVCacheConfig, KVCacheSpec
from cardan.core.types.model import ModelSummary
from cardan.core.types.step import SchedulerOutput
from cardan.core.weights.checkpoint import Checkpoint
from cardan.core.weights.loader import load_weights
from cardan.core.weights.progress import LoadProgress

logger = logging.getLogger("cardan.engine")

# Opens the checkpoint, given the names and shapes that the model wants.
WeightSource = Callable[[Mapping[str, tuple[int, ...]]], Checkpoint]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorParts:
    """What the executor is wired from; all of it was chosen elsewhere.

    ``max_step_tokens`` is the largest step; ``attention`` has the candidates, preferred first.
    ``prompt_logits`` is shown the logits of prompts whose log-probabilities are wanted.
    ``communicator`` joins the ranks that share the model; None: there is one rank.
    """

    device: Device
    config: EngineConfig
    model_class: type[CausalLM]
    ops: KernelRegistry
    attention: Sequence[type[AttentionBackend]]
    shapes: ShapePolicy
    max_step_tokens: int
    processors: Sequence[LogitsProcessor] = ()
    quantization: QuantScheme | None = None
    prompt_logits: PromptLogitsObserver | None = None
    communicator: Communicator | None = None


class KernelExecutor(ModelExecutor):
    """Owner of the model, its pools and its runner."""

    features = frozenset({"prompt_logprobs", "token_mask", "logits_processors"})

    def __init__(self, parts: ExecutorParts) -> None:
        self._parts = parts
        self._model: CausalLM | None = None
        self._summary: ModelSummary | None = None
        self._source: WeightSource | None = None
        self._kv: KVCacheConfig | None = None
        self._pools: Sequence[KVPool] = ()
        self._runner: ModelRunner | None = None
        self._sleep = ExecutorSleep(parts.device)
        self.sleep_levels = parts.device.capabilities.sleep_levels
        self.attention_choices: list[AttentionChoice] = []

    def load(self, model: ModelSummary, source: WeightSource) -> LoadReport:
        device = self._torch_device()
        build = BuildContext(
            dtype=getattr(torch, model.dtype),
            device=device,
            ops=self._parts.ops,
            max_model_len=model.max_model_len,
            block_size=chosen(self._parts.config.cache.block_size, "cache.block_size"),
            kv_dtype=self._kv_dtype(model),
            communicator=self._parts.communicator,
            quantization=self._parts.quantization,
        )
        began = time.monotonic()
        with (
            self._parts.device.memory.region("weights"),
            self._parts.device.inference(),
            weights_fit(model, device),
        ):
            built = self._parts.model_class(model.config, build)
            built_at = time.monotonic()
            checkpoint = source({slot.name: slot.shape for slot in built.weight_slots()})
            try:
                progress = LoadProgress(model.architecture)
                num_bytes = load_weights(built, checkpoint, progress, self._parts.quantization)
            finally:
                # Copies that are still queued read the checkpoint's memory.
                self._parts.device.synchronize()
                checkpoint.close()
        scheme = self._parts.quantization
        if scheme is not None:
            logger.info("quantization %s: %s", scheme.name, scheme.summary())
        self._model, self._summary, self._source = built, model, source
        seconds = {"build_model": built_at - began, "load_weights": time.monotonic() - built_at}
        return LoadReport(num_bytes, seconds)

    def kv_specs(self) -> Sequence[KVCacheSpec]:
        return self._loaded().kv_specs()

    def available_kv_bytes(self, utilization: float) -> int:
        """``utilization`` of what is free, less what steps need beside the cache. Where the device
        cannot measure that, what is not utilized is for it."""
        free = self._parts.device.memory_info().free
        usable = int(free * utilization)
        limits = self._step_limits()
        with self._parts.device.inference(), largest_step_fits(limits):
            need = self._rehearse(limits)
        if need is None:
            return usable
        left = usable - need.step_bytes - need.graph_bytes
        facts = (
            f"of {format_bytes(free)} beside the weights {format_bytes(usable)} may be used "
            f"(memory_utilization {utilization:g}); {limits} takes "
            f"{format_bytes(need.step_bytes)}, graphs about {format_bytes(need.graph_bytes)}"
        )
        if left <= 0:
            raise ConfigError(f"no room for a KV cache: {facts}. {REMEDIES}")
        logger.info("memory: %s, and %s are left for the KV cache", facts, format_bytes(left))
        return left

    def bind_kv(self, config: KVCacheConfig) -> None:
        self._kv = config
        self._bind(config, self._parts.device.memory.kv_pool)

    def sleep(self, level: int) -> None:
        """The runner goes, with its graphs and the buffers of steps; at level 2 the model, too."""
        self._bound()  # or it sleeps already
        self._drop_runner()
        if level != KEEP_WEIGHTS:
            self._model = None
        try:
            self._sleep.begin(level)
        except (OutOfMemoryError, UnsupportedError):
            if self._model is None and self._source is not None:
                self.load(self._described(), self._source)
            self._rebind()
            raise

    def wake(self, tags: Sequence[str]) -> Sequence[str]:
        """Weights that were dropped are loaded again; graphs are captured again."""
        if self._sleep.end(tags):
            self._model = None
        if self._sleep.has_weights and self._model is None and self._source is not None:
            self.load(self._described(), self._source)
        if not self._sleep.asleep and self._runner is None:
            self._rebind()
        return self._sleep.asleep

    def _rebind(self) -> None:
        """A new runner over the pools that there are."""
        if self._kv is None:
            raise RuntimeError("the KV cache is not bound")
        pools = iter(self._pools)
        with rebinding_fits(self._torch_device(), self._drop_runner):
            self._bind(self._kv, lambda *_of: next(pools))
            self.warmup()

    def _bind(self, config: KVCacheConfig, make_pool: PoolMaker) -> None:
        parts = self._parts
        # No sequence is ever longer than what the cache holds.
        max_len = min(self._described().max_model_len, config.num_tokens)
        with parts.device.inference():
            bound = self._bind_layers(config, make_pool)
            self._pools = bound.pools
            self.attention_choices = list(bound.choices)
            if reasons := self._graph_support(bound.choices)[1]:
                logger.warning(
                    "the model runs eagerly because its steps cannot be captured (%s)",
                    "; ".join(reasons),
                )
            self._runner = self._make_runner(config, bound, max_len, parts.processors)
            self._runner.observe_prompt_logits(parts.prompt_logits)

    def warmup(self) -> WarmupReport:
        with self._parts.device.inference():
            return self._bound().capture()

    @property
    def num_live_rows(self) -> int:
        return self._runner.num_live_rows if self._runner else 0

    def forward(self, step: SchedulerOutput) -> None:
        with self._parts.device.inference(), step_fits(step):
            self._bound().forward(step)

    def sample(self, step: SchedulerOutput, mask: TokenMask | None = None) -> StepHandle:
        with self._parts.device.inference(), step_fits(step):
            return self._bound().sample(step, mask)

    def close(self) -> None:
        self._drop_runner()
        self._model = self._summary = self._source = None
        self._pools = ()
        self._parts.device.close()

    def _drop_runner(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.close()

    def _step_limits(self) -> StepLimits:
        parts = self._parts
        return StepLimits(
            num_tokens=parts.max_step_tokens,
            num_rows=chosen(parts.config.scheduler.max_num_seqs, "scheduler.max_num_seqs"),
            max_len=self._described().max_model_len,
            num_logprobs=parts.config.model.max_logprobs,
        )

    def _rehearse(self, limits: StepLimits) -> StepMemory | None:
        """Run the largest steps on blocks of no request; None: the device cannot tell what it took.

        Nothing stays but what libraries and kernels have set up.
        """
        config = KVCacheConfig(group_layers(self.kv_specs()), NULL_BLOCK + 1)
        plans = [make(limits, len(config.groups)) for make in (largest_step, longest_prompt)]
        runners: list[ModelRunner] = []

        def run() -> None:
            bound = self._bind_layers(config, partial(null_pool, device=self._torch_device()))
            runner = self._make_runner(config, bound, limits.max_len, ())
            runners.append(runner)
            for plan in plans:
                runner.forward(plan)
                runner.sample(plan, None).result()

        try:
            step_bytes = self._parts.device.memory.peak_of(run)
            if step_bytes is None:
                return None
            return StepMemory(step_bytes, runners[0].graph_bytes())
        finally:
            for runner in runners:
                runner.close()

    def _bind_layers(self, config: KVCacheConfig, make_pool: PoolMaker) -> BoundLayers:
        parts = self._parts
        return bind_layers(
            config,
            self._loaded().attention_needs(),
            parts.attention,
            parts.device,
            parts.config.device.attention_backend,
            make_pool,
        )

    def _make_runner(
        self,
        config: KVCacheConfig,
        bound: BoundLayers,
        max_len: int,
        processors: Sequence[LogitsProcessor],
    ) -> ModelRunner:
        """A runner for sequences of at most ``max_len`` tokens."""
        parts, summary = self._parts, self._described()
        device = self._torch_device()
        num_rows = chosen(parts.config.scheduler.max_num_seqs, "scheduler.max_num_seqs")
        max_blocks = -(-max_len // config.block_size)
        wide = torch.float64 if parts.device.capabilities.float64 else torch.float32
        sampling = SamplingStates(num_rows, summary.vocab_size, device, parts.ops, processors, wide)
        tables = BlockTables(len(config.groups), num_rows, max_blocks)
        shapes = StepShapes(
            parts.shapes,
            self._graph_support(bound.choices)[0],
            parts.max_step_tokens,
            num_rows,
            max_blocks,
            config.block_size,
        )
        on_host = device.type == "cpu" and parts.device.capabilities.unified_memory
        runner = ModelRunner(
            self._loaded(),
            parts.device,
            RequestStates(num_rows, max_len, device, on_host=on_host),
            self._make_sampler(sampling),
            self._make_batch(shapes, tables, on_host),
            shapes,
            parts.ops.bind("finite_rows", dtype=summary.dtype, hidden=summary.hidden_size),
        )
        runner.bind_kv(bound.backends, bound.pools, bound.layers)
        return runner

    def _make_batch(self, shapes: StepShapes, tables: BlockTables, on_host: bool) -> StepBuffers:
        sizes, block_size = shapes.buffer_sizes, shapes.block_size
        if on_host:
            return HostInputBatch(*sizes, tables, block_size)
        kernel = self._parts.ops.bind("step_inputs", dtype="float32")
        return InputBatch(*sizes, tables, block_size, self._parts.device, kernel)

    def _make_sampler(self, states: SamplingStates) -> Sampler:
        communicator, ops = self._parts.communicator, self._parts.ops
        return RankSampler(states, ops, communicator) if communicator else Sampler(states, ops)

    def _kv_dtype(self, model: ModelSummary) -> str:
        """The setting; ``auto`` is the model's dtype, or, where quantised weights have rounded more
        than that already, float16 instead of float32."""
        wanted = self._parts.config.cache.kv_cache_dtype
        if wanted != "auto":
            return wanted
        is_rounded = self._parts.quantization is not None
        is_known = "float16" in self._parts.device.capabilities.dtypes
        return "float16" if model.dtype == "float32" and is_rounded and is_known else model.dtype

    def _graph_support(
        self, choices: Sequence[AttentionChoice]
    ) -> tuple[GraphSupport, Sequence[str]]:
        """What will be captured: as much as device, settings, shapes and attention allow; and what
        stands in the way of the device's graphs."""
        support = self._parts.device.capabilities.graphs
        is_eager = chosen(self._parts.config.device.enforce_eager, "device.enforce_eager")
        if support == "none" or is_eager:
            return "none", ()
        reasons = []
        if not self._parts.shapes.sequence_buckets and not self._parts.shapes.lazy:
            reasons.append("the platform names no sequence buckets")
        communicator = self._parts.communicator
        if communicator is not None and "graph_safe" not in communicator.features:
            reasons.append("its ranks exchange in a way that cannot be captured")
        for choice in choices:
            if support == "full" and not choice.captured:
                support = "decode"
            if not choice.captured_decode:
                why = ", ".join(choice.captured_decode.reasons)
                reasons.append(f"{choice.backend.name} attention: {why}")
        return ("none" if reasons else support), reasons

    def _torch_device(self) -> torch.device:
        device = self._parts.device.torch_device
        if device is None:
            name = self._parts.device.info.name
            raise UnsupportedError(f"{name} has no torch device; it needs an executor of its own")
        return device

    def _loaded(self) -> CausalLM:
        if self._model is None:
            raise RuntimeError("the model is not loaded")
        return self._model

    def _described(self) -> ModelSummary:
        if self._summary is None:
            raise RuntimeError("the model is not loaded")
        return self._summary

    def _bound(self) -> ModelRunner:
        if self._runner is None:
            raise RuntimeError("the KV cache is not bound")
        return self._runner
