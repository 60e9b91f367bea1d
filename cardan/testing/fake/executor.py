"""The executor tier of the fake device: whole steps on its queue, a cache that nobody else sees."""

from collections.abc import Mapping, Sequence
from typing import Any

from cardan.core.interfaces.errors import ConfigError
from cardan.core.interfaces.executor import (
    LoadReport,
    ModelExecutor,
    StepHandle,
    TokenMask,
    WarmupReport,
)
from cardan.core.interfaces.platform import ConfigView
from cardan.core.types.kv import KVCacheConfig, KVCacheSpec
from cardan.core.types.model import ModelSummary
from cardan.core.types.step import ModelRunnerOutput, SchedulerOutput
from cardan.testing.fake.numpy_llama import NumpyLlama
from cardan.testing.fake.opaque_device import OpaqueDevice
from cardan.testing.fake.queue import QueueEvent
from cardan.testing.fake.rows import DeviceRows
from cardan.testing.fake.settings import FakeSettings
from cardan.testing.fake.step_models import DigestModel, LlamaModel, StepModel, plain_output


class FakeStepHandle(StepHandle):
    """A step on the queue; its result is put here by the device's thread before the event."""

    def __init__(self) -> None:
        self.event = QueueEvent()
        self.output: ModelRunnerOutput | None = None

    def done(self) -> bool:
        return self.event.query()

    def result(self) -> ModelRunnerOutput:
        self.event.synchronize()
        if self.output is None:
            raise RuntimeError("fake device: closed before the step had run")
        return self.output


class FakeExecutor(ModelExecutor):
    """Queues every step and returns at once. Honours plain sampling, nothing else."""

    features = frozenset[str]()

    def __init__(self, device: OpaqueDevice, settings: FakeSettings, config: ConfigView) -> None:
        foreign = sorted(settings.faults - {"lost_edit"})
        if foreign:
            raise ConfigError(
                f"the fake executor cannot act out fault={foreign[0]}; "
                "the kernel tier can, or use a fault at a step"
            )
        self._device = device
        self._settings = settings
        self._num_rows: int = config.get("scheduler.max_num_seqs")
        self._block_size: int = config.get("cache.block_size")
        self._max_model_len = 0
        self._model: StepModel | None = None
        self._rows: DeviceRows | None = None

    @property
    def num_live_rows(self) -> int:
        """Rows in use; meaningful while the queue is empty."""
        return self._rows.num_live if self._rows else 0

    def load(self, model: ModelSummary, source: Any) -> LoadReport:
        self._max_model_len = model.max_model_len
        if self._settings.model == "digest":
            self._model = DigestModel(model.vocab_size, model.max_model_len)
        else:
            self._model = _read_llama(model.config, source)
        self._device.memory.take("weights", self._model.weight_bytes)
        return LoadReport(self._model.weight_bytes)

    def kv_specs(self) -> Sequence[KVCacheSpec]:
        return self._loaded().specs(self._block_size)

    def available_kv_bytes(self, utilization: float) -> int:
        return int(self._device.memory.free * utilization)

    def bind_kv(self, config: KVCacheConfig) -> None:
        self._device.memory.take("kv", config.num_bytes)
        self._loaded().bind(config.num_blocks, config.block_size)
        loses_edits = "lost_edit" in self._settings.faults
        self._rows = DeviceRows(self._num_rows, self._max_model_len, config.block_size, loses_edits)

    def warmup(self) -> WarmupReport:
        return WarmupReport()

    def forward(self, step: SchedulerOutput) -> None:
        """Nothing yet: both halves of a step are one task, queued by ``sample``."""

    def sample(self, step: SchedulerOutput, mask: TokenMask | None = None) -> StepHandle:
        handle = FakeStepHandle()
        self._device.queue.submit(lambda: self._run(step, handle))
        self._device.end_step()
        self._device.queue.mark(lambda: handle.event.pass_by(self._device.queue.error))
        return handle

    def close(self) -> None:
        self._device.close()
        self._model = self._rows = None

    def _run(self, step: SchedulerOutput, handle: FakeStepHandle) -> None:
        """One step, on the device's thread."""
        model, rows = self._loaded(), self._rows
        if rows is None:
            raise RuntimeError("the KV cache is not bound")
        rows.apply(step)
        for copies in step.block_copies:
            if len(copies.sources):
                model.copy_blocks(copies)
        batch = rows.gather(step)
        if not len(batch.rows):
            handle.output = plain_output(batch.token_ids)
            return
        output = model.run(batch, rows)
        rows.append(batch, output.token_ids[:, 0])
        handle.output = output

    def _loaded(self) -> StepModel:
        if self._model is None:
            raise RuntimeError("the model is not loaded")
        return self._model


def _read_llama(config: Mapping[str, Any], source: Any) -> LlamaModel:
    checkpoint = source(NumpyLlama.weight_shapes(config))
    try:
        return LlamaModel(config, lambda name: checkpoint.tensor(name).float().numpy())
    finally:
        checkpoint.close()
