"""One of the two platforms: the model on it, and one step after the other, watched."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Self

import numpy as np

from cardan.bootstrap.engine_choice import choose
from cardan.bootstrap.executor_builder import ExecutorBuilder
from cardan.bootstrap.model_source import read_model
from cardan.bootstrap.quantization import choose_scheme
from cardan.core.config.engine import EngineConfig
from cardan.core.discovery import Discovery
from cardan.core.interfaces.attention import AttentionBackend
from cardan.core.interfaces.kernels import OpSpec
from cardan.core.kvcache.sizing import group_layers
from cardan.core.ops.catalogue import CATALOGUE
from cardan.core.ops.reference.attention import ReferenceAttention
from cardan.core.plugin_manager import PluginManager
from cardan.core.runner.kernel_executor import ExecutorParts, KernelExecutor
from cardan.core.runtime import Runtime
from cardan.core.types.errors import ConfigError
from cardan.core.types.kv import KVCacheConfig
from cardan.core.types.sampling_params import SamplingParams
from cardan.core.types.step import BlockCopies, BlockEdits, NewRow, SchedulerOutput
from cardan.diff.recorder import (
    Listener,
    Recorder,
    RecordingRegistry,
    recording_attention,
    recording_model,
)

# The logits of every position are computed, as for prompts whose log-probabilities are wanted.
_ALL_LOGITS = SamplingParams(temperature=0.0, prompt_logprobs=0, detokenize=False)
_NONE = np.zeros(0, np.int32)


def watched_config(config: EngineConfig, num_rows: int) -> EngineConfig:
    """``config`` for steps that are watched: without graphs.

    Raises:
        ConfigError: the model is to be shared by several ranks.
    """
    if config.parallel.tensor_parallel_size != 1:
        raise ConfigError(
            "parallel.tensor_parallel_size must be 1: calls of several ranks are not compared"
        )
    config = config.with_value("scheduler.max_num_seqs", num_rows)
    return config.with_value("device.enforce_eager", True)


class Side:
    """Owner of a model on one device, under the core's runner with a recorder in between.

    ``is_watchable`` is False where the platform runs whole steps itself; then there is no model.
    """

    def __init__(self, config: EngineConfig, num_rows: int, unchecked: bool = False) -> None:
        """Open the device and load the weights. ``num_rows`` sequences can be run side by side.

        Raises:
            CardanError: with the cause and the remedy; nothing stays open.
        """
        discovery = Discovery()
        plugins = PluginManager(config.plugins, discovery)
        source = read_model(config.model)
        chosen = choose(watched_config(config, num_rows), discovery, plugins, source)
        self.platform, self.info, self.dtype = chosen.platform.name, chosen.info, ""
        self._num_rows = num_rows
        self._recorder = Recorder()
        self._executor: KernelExecutor | None = None
        self._step_id = 0
        self._num_blocks = 0
        self._live: list[int] = []
        with ExitStack() as on_error:
            self._runtime = Runtime()
            on_error.callback(self._runtime.close)
            device = self._runtime.open(chosen.platform, chosen.info)
            builder = ExecutorBuilder(
                chosen.platform, chosen.info, chosen.config, discovery, plugins, source, device
            )
            own = chosen.platform.executor(device, chosen.config, builder)
            self.is_watchable = own is None
            if own is not None:
                own.close()
            else:
                self._load(builder, unchecked)
            on_error.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the model and the device. Idempotent."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.close()
        self._runtime.close()

    def bind(self, longest: int) -> None:
        """Make room for sequences of at most ``longest`` tokens. Called once."""
        executor = self._loaded()
        groups = group_layers(executor.kv_specs())
        self._num_blocks = -(-longest // groups[0].spec.block_size)
        self._num_groups = len(groups)
        executor.bind_kv(KVCacheConfig(groups, self._num_blocks * self._num_rows + 1))

    def run(
        self, row: int, token_ids: Sequence[int], start: int, stop: int, listener: Listener
    ) -> None:
        """Compute the tokens from ``start`` to ``stop`` of the sequence in ``row``, and the logits
        behind each, showing calls to ``listener``. A sequence begins at 0 and goes on from there.
        """
        executor = self._loaded()
        new = [] if start else [self._new_row(row, token_ids)]
        freed = [row] if not start and row in self._live else []
        self._live += [row] if row not in self._live else []
        self._step_id += 1
        plan = SchedulerOutput(
            step_id=self._step_id,
            new_rows=new,
            freed_rows=freed,
            block_edits=(BlockEdits(_NONE, _NONE, _NONE),) * self._num_groups,
            block_copies=(BlockCopies(_NONE, _NONE),) * self._num_groups,
            rows=np.array([row], np.int32),
            keys=np.array([row], np.int64),
            num_scheduled_tokens=np.array([stop - start], np.int32),
            num_computed_tokens=np.array([start], np.int32),
            samples=np.array([False]),
        )
        with self._recorder.listening(listener):
            executor.forward(plan)
            executor.sample(plan).result()

    def _load(self, builder: ExecutorBuilder, unchecked: bool) -> None:
        platform, info, config = builder.platform, builder.info, builder.config
        self.ops: dict[str, OpSpec] = {op.name: op for op in (*CATALOGUE, *builder.plugins.ops())}
        providers = (
            *platform.kernels(info),
            *builder.plugins.kernels(platform.name, info),
        )
        torch_device = builder.device.torch_device
        if torch_device is None:
            raise ConfigError(
                f"platform {platform.name} offers neither a torch device nor an executor; "
                "see `cardan doctor`"
            )
        registry = RecordingRegistry(
            self._recorder,
            tuple(self.ops.values()),
            providers,
            device=torch_device,
            features=builder.device.capabilities.instruction_sets,
            float64=builder.device.capabilities.float64,
            pins=config.device.kernels,
            unchecked=unchecked,
        )
        summary = builder.summary()
        shapes = platform.shapes(summary, info)
        self.dtype = summary.dtype
        self.max_step_tokens = builder.max_step_tokens(shapes)
        attention: tuple[type[AttentionBackend], ...] = (
            *platform.attention(info),
            ReferenceAttention,
        )
        model = builder.model_class(summary.architecture)
        self._executor = KernelExecutor(
            ExecutorParts(
                device=builder.device,
                config=config,
                model_class=recording_model(model, self._recorder),
                ops=registry,
                attention=tuple(recording_attention(item, self._recorder) for item in attention),
                shapes=replace(shapes, lazy=False),
                max_step_tokens=self.max_step_tokens,
                quantization=choose_scheme(config.model, builder.source, builder.discovery),
            )
        )
        self._executor.load(summary, builder.open_weights)

    def _new_row(self, row: int, token_ids: Sequence[int]) -> NewRow:
        first = 1 + row * self._num_blocks
        blocks = np.arange(first, first + self._num_blocks, dtype=np.int32)
        return NewRow(
            row=row,
            key=row,
            token_ids=np.array(token_ids, np.int32),
            num_prompt_tokens=len(token_ids),
            num_computed_tokens=0,
            params=_ALL_LOGITS,
            seed=0,
            stop_token_ids=(),
            bad_words_token_ids=(),
            block_ids=(blocks,) * self._num_groups,
        )

    def _loaded(self) -> KernelExecutor:
        if self._executor is None:
            raise RuntimeError(f"platform {self.platform} runs whole steps itself, or is closed")
        return self._executor
