"""The TPU platform's executor: a step is one program, compiled once for its shape."""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from cardan.core.interfaces.errors import ConfigError, OutOfMemoryError, UnsupportedError
from cardan.core.interfaces.executor import (
    LoadReport,
    ModelExecutor,
    ModelParts,
    StepHandle,
    TokenMask,
    WarmupReport,
)
from cardan.core.interfaces.model import BuildContext, CausalLM
from cardan.core.interfaces.platform import ConfigView
from cardan.core.types.kv import KVCacheConfig, KVCacheSpec
from cardan.core.types.model import ModelSummary
from cardan.core.types.step import ModelRunnerOutput, SchedulerOutput
from cardan.platforms.tpu.attention import PagedKernels, PallasKernels, XlaKernels
from cardan.platforms.tpu.buckets import StepBuckets, demanding, step_policy, table_size
from cardan.platforms.tpu.device import TpuDevice
from cardan.platforms.tpu.memory_errors import steps_compile, steps_fit
from cardan.platforms.tpu.programs import ENTERING_ROWS, Programs, StepResult
from cardan.platforms.tpu.results import ResultRows, output_of
from cardan.platforms.tpu.rows import Rows
from cardan.platforms.tpu.step_fields import StepFields
from cardan.platforms.tpu.step_state import ProgramSizes, StepState, abstract_state, zero_state
from cardan.platforms.tpu.traced_model import TracedModel
from cardan.platforms.tpu.traced_step import refusals

logger = logging.getLogger("cardan.engine")

# Of 1 MiB, what the kernels' other scalars leave.
MAX_TABLE_ENTRIES = 250_000


class TpuStepHandle(StepHandle):
    """A launched step; its arrays are the program's results."""

    def __init__(self, result: StepResult | None, rows: ResultRows) -> None:
        self._result = result
        self._rows = rows

    def done(self) -> bool:
        return self._result is None or self._result.rows.is_ready()

    def result(self) -> ModelRunnerOutput:
        with steps_fit("a step"):
            return output_of(self._result, self._rows)


@dataclass(slots=True)
class _Loaded:
    """A model on the device."""

    summary: ModelSummary
    modules: CausalLM
    traced: TracedModel
    weight_bytes: int


class TpuExecutor(ModelExecutor):
    """Owner of the model's weights, the caches, the rows' tokens and the programs.

    Sampled tokens are written to the rows' history by the program that samples them, and read by
    the next one, so that the host may plan ahead.
    """

    features = frozenset({"token_mask", "prompt_logprobs"})

    def __init__(self, device: TpuDevice, config: ConfigView, parts: ModelParts) -> None:
        self._device = device
        self._config = config
        self._parts = parts
        self._max_rows: int = config.get("scheduler.max_num_seqs")
        self._max_tokens: int = config.get("scheduler.max_num_batched_tokens")
        self._block_size: int = config.get("cache.block_size")
        self._loaded: _Loaded | None = None
        self._programs: Programs | None = None
        self._state: StepState | None = None
        self._rows: Rows | None = None
        self._buckets: StepBuckets | None = None

    @property
    def num_live_rows(self) -> int:
        return self._rows.num_live if self._rows else 0

    @property
    def num_programs(self) -> int:
        """Programs of steps compiled so far."""
        return self._programs.num_steps if self._programs else 0

    def load(self, model: ModelSummary, source: Any) -> LoadReport:
        """The modules are filled on the host, one trace finds their weights, and these go to the
        device; the host keeps no copy."""
        began = time.monotonic()
        build = BuildContext(
            dtype=getattr(torch, model.dtype),
            device=torch.device("cpu"),
            ops=self._parts.ops(torch.device("cpu")),
            max_model_len=model.max_model_len,
            block_size=self._block_size,
            kv_dtype=model.dtype,
        )
        modules = self._parts.model_class(model.architecture)(model.config, build)
        _check(modules)
        built = time.monotonic()
        report = self._parts.load_weights(modules, source)
        uploaded = time.monotonic()
        traced = TracedModel(modules)
        with steps_fit("the weights"):
            num_bytes = traced.upload(self._device.placement)
        self._device.memory.note("weights", num_bytes)
        self._loaded = _Loaded(model, modules, traced, num_bytes)
        seconds = {
            "build_model": built - began,
            **report.seconds,
            "upload_weights": time.monotonic() - uploaded,
        }
        return LoadReport(num_bytes, seconds)

    def kv_specs(self) -> Sequence[KVCacheSpec]:
        return self._model().modules.kv_specs()

    def available_kv_bytes(self, utilization: float) -> int:
        """``utilization`` of what is free, less what the largest step needs beside the cache, as
        its compiled program says."""
        size = self._device.placement.size
        # Caches whose heads cannot be cut are whole on every device.
        is_cut = all(spec.num_kv_heads % size == 0 for spec in self.kv_specs())
        copies = 1 if is_cut else size
        usable = int(self._device.memory_info().free * utilization) // copies
        if self._device.is_host:
            return usable
        with steps_fit("the largest step"):
            step_bytes = self._largest_step_bytes() * size // copies
        if step_bytes >= usable:
            raise ConfigError(
                f"no room for a KV cache: {usable >> 20} MiB may be used beside the weights, the "
                f"largest step takes {step_bytes >> 20} MiB; lower max_num_batched_tokens or "
                "max_model_len"
            )
        logger.info("memory: the largest step takes %d MiB", step_bytes >> 20)
        return usable - step_bytes

    def bind_kv(self, config: KVCacheConfig) -> None:
        if len(config.groups) != 1:
            raise UnsupportedError("the tpu platform keeps the caches of all layers in one group")
        loaded = self._model()
        # No sequence is ever longer than what the cache holds.
        max_len = min(loaded.summary.max_model_len, config.num_tokens)
        sizes = ProgramSizes(self._block_size, loaded.summary.vocab_size, self._max_rows, max_len)
        self._programs = self._make_programs(loaded, sizes)
        if not self._device.is_host:
            _check_tables(sizes)
        with steps_fit("the KV cache"):
            self._state = zero_state(
                self.kv_specs(), self._kernels(), self._device.placement, sizes, config.num_blocks
            )
        self._device.memory.note("kv", config.num_bytes)
        self._rows = Rows(
            self._max_rows, -(-max_len // self._block_size), loaded.summary.vocab_size
        )
        self._buckets = StepBuckets(
            step_policy(max_len), self._max_rows, self._max_tokens, self._block_size
        )

    def warmup(self) -> WarmupReport:
        """On a TPU all usual programs are compiled, since a compilation would hold up whoever is
        being served; on a host the first of each kind, the others when they are wanted."""
        programs, buckets, state, _ = self._bound()
        began = time.monotonic()
        shapes = list(buckets.usual())
        if self._device.is_host:
            shapes = [next(shape for shape in shapes if not shape.has_prompts)]
        with steps_fit("a step"):
            for shape in shapes:
                programs.step(shape, state)
            if not self._device.is_host:
                programs.prepare_changes(state)
        return WarmupReport(num_graphs=len(shapes), seconds=time.monotonic() - began)

    def forward(self, step: SchedulerOutput) -> None:
        """Rows change and blocks are copied; ``sample`` runs the step itself."""
        programs, _, _, rows = self._bound()
        rows.apply(step)
        for first in range(0, len(step.new_rows), ENTERING_ROWS):
            new = step.new_rows[first : first + ENTERING_ROWS]
            with self._changing() as state:
                self._state = programs.enter(
                    state, [item.row for item in new], [item.token_ids for item in new]
                )
        copies = step.block_copies[0]
        if len(copies.sources):
            with self._changing() as state:
                self._state = programs.copy_blocks(state, copies.sources, copies.targets)

    def sample(self, step: SchedulerOutput, mask: TokenMask | None = None) -> StepHandle:
        programs, buckets, _, rows = self._bound()
        batch = StepFields(step, rows, mask)
        kept = ResultRows(
            step.rows, step.samples, rows.num_logprobs[step.rows], batch.prompt_tables()
        )
        if not len(step.rows):
            return TpuStepHandle(None, kept)
        shape = batch.flavoured(
            buckets.shape(batch.num_tokens, len(step.rows), batch.longest, batch.has_prompts)
        )
        layout = programs.layout(shape)
        words = layout.packed(batch.fields(layout))
        with steps_compile():
            programs.step(shape, self._state)
        with self._changing() as state:
            self._state, result = programs.run(shape, state, words, batch.bias(shape))
        return TpuStepHandle(result, kept)

    def close(self) -> None:
        self._loaded = self._programs = self._state = self._rows = self._buckets = None
        self._device.close()

    @contextmanager
    def _changing(self) -> Iterator[StepState]:
        """Gives the state to a program, which uses it up.

        Raises:
            OutOfMemoryError: it does not fit, and was not begun.
            RuntimeError: it failed when the state was used up; no further step can run.
        """
        _, _, state, _ = self._bound()
        try:
            with steps_fit("a step"):
                yield state
        except OutOfMemoryError as error:
            if not state.is_lost:
                raise
            raise RuntimeError(f"the KV cache is lost, since {error}") from error

    def _kernels(self) -> PagedKernels:
        if self._device.is_host:
            return XlaKernels()
        return PallasKernels(self._block_size, self._device.placement)

    def _make_programs(self, loaded: _Loaded, sizes: ProgramSizes) -> Programs:
        precise = loaded.summary.dtype == "float32"
        return Programs(loaded.traced, self._kernels(), self._device.placement, sizes, precise)

    def _largest_step_bytes(self) -> int:
        """Bytes on each device, beside weights and caches, of the program with the most tokens,
        rows and keys, which does all that requests may ask for."""
        loaded = self._model()
        summary = loaded.summary
        sizes = ProgramSizes(
            self._block_size, summary.vocab_size, self._max_rows, summary.max_model_len
        )
        buckets = StepBuckets(
            step_policy(summary.max_model_len), self._max_rows, self._max_tokens, self._block_size
        )
        shape = demanding(
            buckets.shape(self._max_tokens, self._max_rows, summary.max_model_len, True),
            table_size(self._config.get("model.max_logprobs"), summary.vocab_size),
        )
        programs = self._make_programs(loaded, sizes)
        state = abstract_state(
            self.kv_specs(), self._kernels(), self._device.placement, sizes, num_blocks=2
        )
        analysis = programs.step(shape, state).memory_analysis()
        results = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
        history = state.history.size * state.history.dtype.itemsize
        return int(analysis.temp_size_in_bytes + results + history)

    def _model(self) -> _Loaded:
        if self._loaded is None:
            raise RuntimeError("the model is not loaded")
        return self._loaded

    def _bound(self) -> tuple[Programs, StepBuckets, StepState, Rows]:
        if not (self._programs and self._buckets and self._state and self._rows):
            raise RuntimeError("the KV cache is not bound")
        return self._programs, self._buckets, self._state, self._rows


def _check(model: CausalLM) -> None:
    """Raises UnsupportedError where the programs cannot do what the model's attention wants."""
    reasons = {reason: None for need in model.attention_needs() for reason in refusals(need)}
    if reasons:
        raise UnsupportedError(f"the tpu platform has no {', no '.join(reasons)}")


def _check_tables(sizes: ProgramSizes) -> None:
    """Raises ConfigError where the block tables of a step do not fit into scalar memory."""
    width = -(-sizes.max_len // sizes.block_size)
    if sizes.num_rows * width > MAX_TABLE_ENTRIES:
        raise ConfigError(
            f"scheduler.max_num_seqs {sizes.num_rows} times {width} blocks of a sequence of "
            f"{sizes.max_len} tokens are more than the {MAX_TABLE_ENTRIES} block ids that a TPU's "
            "scalar memory holds; raise --block-size, or lower --max-num-seqs or --max-model-len"
        )
