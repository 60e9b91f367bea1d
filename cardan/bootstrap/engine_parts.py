"""Builds an engine on an opened device: model, weights, cache, scheduler."""

import logging
import os
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from cardan.bootstrap.engine_choice import Chosen
from cardan.bootstrap.executor_builder import ExecutorBuilder
from cardan.bootstrap.model_source import ModelSource
from cardan.bootstrap.plugin_observer import PluginObserver
from cardan.bootstrap.quantization import NO_SCHEME
from cardan.bootstrap.ranks import start_ranks
from cardan.core.config.fallbacks import chosen
from cardan.core.discovery import LOGITS_PROCESSORS, POLICIES, Discovery
from cardan.core.engine.client import EngineParts
from cardan.core.engine.engine import Engine
from cardan.core.interfaces.device import Device
from cardan.core.interfaces.errors import ConfigError, PluginError
from cardan.core.interfaces.executor import LoadReport, ModelExecutor
from cardan.core.interfaces.logits import LogitsProcessor
from cardan.core.kvcache.manager import KVCacheManager
from cardan.core.kvcache.sizing import fit_model_len, format_bytes, size_cache
from cardan.core.observability.timing import Phases
from cardan.core.ops.registry import KernelRegistry
from cardan.core.plugin_manager import PluginManager
from cardan.core.runner.model_runner import PromptLogitsObserver
from cardan.core.runner.ranked_executor import RankedExecutor
from cardan.core.runtime import Runtime
from cardan.core.scheduler.intake import Intake
from cardan.core.scheduler.scheduler import Scheduler
from cardan.core.types.engine_info import EngineInfo
from cardan.core.types.errors import InputError
from cardan.core.types.kv import KVCacheConfig
from cardan.core.types.model import ModelSummary
from cardan.core.types.sampling_params import SamplingParams

logger = logging.getLogger("cardan.engine")


class PartsBuilder:
    """The steps after the device is open."""

    def __init__(
        self,
        chosen: Chosen,
        discovery: Discovery,
        plugins: PluginManager,
        source: ModelSource,
        runtime: Runtime,
        device: Device,
        phases: Phases,
    ) -> None:
        self._platform = chosen.platform
        self._info = chosen.info
        self._capabilities = chosen.capabilities
        self._config = chosen.config
        self._devices = chosen.devices
        self._discovery = discovery
        self._plugins = plugins
        self._source = source
        self._runtime = runtime
        self._executor_builder = ExecutorBuilder(
            chosen.platform, chosen.info, chosen.config, discovery, plugins, source, device
        )
        self._device = device
        self._phases = phases
        self._warnings: list[str] = []
        self._processors: tuple[LogitsProcessor, ...] = ()
        # Where the core runs the steps.
        self._kernels: KernelRegistry | None = None

    def build(self, prompt_logits: PromptLogitsObserver | None) -> EngineParts:
        summary = self._executor_builder.summary()
        self._processors = self._load_processors(summary)
        executor = self._executor(summary, prompt_logits)
        with ExitStack() as on_error:
            on_error.callback(executor.close)
            parts = self._build_on(executor, summary)
            on_error.pop_all()
        return parts

    def _build_on(self, executor: ModelExecutor, summary: ModelSummary) -> EngineParts:
        if "logits_processors" not in executor.features:
            self._leave_out_processors()
        report = executor.load(summary, self._executor_builder.open_weights)
        for name, seconds in report.seconds.items():
            self._phases.add(name, seconds)
        self._plugins.notify("cardan_model_loaded", report=report)
        with self._phases.phase("kv_cache"):
            kv = self._size_kv(executor, summary)
            length, warning = fit_model_len(
                kv, summary.max_model_len, self._config.model.max_model_len is not None
            )
            if warning:
                self._warn(warning)
            executor.bind_kv(kv)
        with self._phases.phase("warmup"):
            executor.warmup()
        if self._kernels is not None:
            plan = tuple(self._kernels.explain())
            self._plugins.notify("cardan_kernel_plan_ready", plan=plan)
        return self._finish(summary, executor, report, kv, length)

    def _load_processors(self, summary: ModelSummary) -> tuple[LogitsProcessor, ...]:
        device = self._device.torch_device or torch.device("cpu")
        blocked = self._config.plugins.blocked
        names = [n for n in self._discovery.names(LOGITS_PROCESSORS) if n not in blocked]
        loaded = []
        for name in names:
            try:
                loaded.append(
                    self._discovery.load(LOGITS_PROCESSORS, name)(summary.vocab_size, device)
                )
            except PluginError as error:
                if name in self._config.plugins.required:
                    raise
                self._warn(str(error))
        return tuple(loaded)

    def _leave_out_processors(self) -> None:
        for processor in self._processors:
            self._warn(
                f"logits processor {processor.name} is not used: platform "
                f"{self._platform.name} runs whole steps without processors"
            )
        self._processors = ()

    def _executor(
        self, summary: ModelSummary, prompt_logits: PromptLogitsObserver | None
    ) -> ModelExecutor:
        own = self._platform.executor(self._device, self._config, self._executor_builder)
        if own is not None and prompt_logits is not None:
            raise ConfigError(
                f"platform {self._platform.name} runs whole steps and shows no logits; "
                "choose another with --platform"
            )
        quantization = self._config.model.quantization
        if own is not None and quantization not in (None, NO_SCHEME):
            raise ConfigError(
                f"model.quantization is {quantization}, but platform {self._platform.name} runs "
                "whole steps and stores weights its own way; leave it out"
            )
        if own is not None:
            return own
        builder = self._executor_builder
        self._kernels = builder.kernels()
        ranks = self._config.parallel.tensor_parallel_size
        if ranks == 1:
            return builder.kernel_executor(
                summary, self._kernels, processors=self._processors, prompt_logits=prompt_logits
            )
        with self._phases.phase("start_ranks"):
            others, communicator = start_ranks(builder, self._devices)
        try:
            local = builder.kernel_executor(
                summary,
                self._kernels,
                processors=self._processors,
                prompt_logits=prompt_logits,
                communicator=communicator,
            )
        except BaseException:
            others.close()
            raise
        return RankedExecutor(local, others)

    def _size_kv(self, executor: ModelExecutor, summary: ModelSummary) -> KVCacheConfig:
        cache = self._config.cache
        budget = cache.kv_cache_memory_bytes
        if budget is None and cache.num_blocks is None:
            share = chosen(cache.memory_utilization, "cache.memory_utilization")
            budget = executor.available_kv_bytes(share)
        num_seqs = chosen(self._config.scheduler.max_num_seqs, "scheduler.max_num_seqs")
        most = summary.max_model_len * num_seqs
        return size_cache(executor.kv_specs(), budget or 0, cache.num_blocks, most)

    def _finish(
        self,
        summary: ModelSummary,
        executor: ModelExecutor,
        report: LoadReport,
        kv: KVCacheConfig,
        length: int,
    ) -> EngineParts:
        config = self._config
        scheduling = config.scheduler
        prefix_caching = chosen(config.cache.enable_prefix_caching, "cache.enable_prefix_caching")
        cache = KVCacheManager(kv, prefix_caching)
        policy = self._discovery.load(POLICIES, scheduling.policy)()
        check = partial(self._check_params, executor.features)
        intake = Intake(scheduling, policy, cache, length, self._plugins.admit, check)
        shapes = self._platform.shapes(summary, self._info)
        most = self._executor_builder.max_step_tokens(shapes)
        observer = PluginObserver(self._plugins)
        scheduler = Scheduler(scheduling, cache, intake, length, most, observer.note_end)
        depth = scheduling.async_depth
        depth = self._capabilities.async_depth if depth is None else depth
        engine = Engine(scheduler, executor, depth)
        self._plugins.notify("cardan_engine_started")
        observer.start()

        def close(reason: str) -> None:
            observer.close()
            executor.close()
            self._runtime.close()
            self._plugins.notify("cardan_engine_stopped", reason=reason)

        info = self._engine_info(summary, executor, report, kv, length)
        logger.info(
            "ready in %s: %s %s on %s, KV cache %s (%d tokens, %.1f requests of %d tokens)",
            self._phases,
            summary.architecture,
            summary.dtype,
            self._info.name,
            format_bytes(kv.num_bytes),
            kv.num_tokens,
            kv.num_tokens / length,
            length,
        )
        return EngineParts(engine, info, observer, cache.reset_prefix_cache, close)

    def _check_params(self, features: frozenset[str], params: SamplingParams) -> InputError | None:
        """What an executor of ``features`` and the logits processors cannot honour, or None."""
        if params.prompt_logprobs is not None and "prompt_logprobs" not in features:
            return InputError(
                f"platform {self._platform.name} computes no prompt_logprobs; leave them out",
                "prompt_logprobs",
            )
        refusal = self._refuse_extra_args(params)
        return None if refusal is None else InputError(refusal, "extra_args")

    def _refuse_extra_args(self, params: SamplingParams) -> str | None:
        for processor in self._processors:
            if (refusal := processor.validate(params)) is not None:
                return refusal
        if params.extra_args and not any(item.wants(params) for item in self._processors):
            names = ", ".join(item.name for item in self._processors) or "none"
            return (
                f"no logits processor takes extra_args {', '.join(sorted(params.extra_args))} "
                f"(installed: {names})"
            )
        return None

    def _engine_info(
        self,
        summary: ModelSummary,
        executor: ModelExecutor,
        report: LoadReport,
        kv: KVCacheConfig,
        length: int,
    ) -> EngineInfo:
        config = self._config
        takes = config.model.generation_config == "auto"
        return EngineInfo(
            model=config.model.model,
            architecture=summary.architecture,
            platform=self._platform.name,
            device=self._info.name,
            dtype=summary.dtype,
            vocab_size=summary.vocab_size,
            max_model_len=length,
            max_num_seqs=chosen(config.scheduler.max_num_seqs, "scheduler.max_num_seqs"),
            max_num_batched_tokens=chosen(
                config.scheduler.max_num_batched_tokens, "scheduler.max_num_batched_tokens"
            ),
            max_logprobs=config.model.max_logprobs,
            block_size=kv.block_size,
            num_blocks=kv.num_blocks,
            kv_cache_bytes=kv.num_bytes,
            weight_bytes=report.weight_bytes,
            startup_seconds={**self._phases.seconds, "total": self._phases.elapsed},
            features=tuple(sorted(executor.features)),
            generation_config=_plain(self._source.generation_config) if takes else {},
            warnings=tuple(self._warnings),
            pid=os.getpid(),
        )

    def _warn(self, message: str) -> None:
        self._warnings.append(message)
        logger.warning(message)


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that can travel."""
    kinds = (str, int, float, bool)
    return {name: value for name, value in config.items() if isinstance(value, kinds)}
