"""One executor made of several ranks, each with its part of the model and of the KV cache."""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from cardan.core.interfaces.errors import CardanError, OutOfMemoryError
from cardan.core.interfaces.executor import (
    LoadReport,
    ModelExecutor,
    StepHandle,
    TokenMask,
    WarmupReport,
)
from cardan.core.runner.rank_messages import (
    AskMemory,
    BindKV,
    Command,
    Done,
    Forward,
    Load,
    Memory,
    Sample,
    Sleep,
    Wake,
    Warmup,
)
from cardan.core.runner.rank_processes import RankFailed, RankProcesses, Reply
from cardan.core.types.kv import KVCacheConfig, KVCacheSpec
from cardan.core.types.model import ModelSummary
from cardan.core.types.step import ModelRunnerOutput, SchedulerOutput

if TYPE_CHECKING:
    from cardan.core.runner.kernel_executor import KernelExecutor

Result = TypeVar("Result")

# How much longer than this rank the others may take over what is no step: seconds, and times.
_SLACK_S = 120.0
_SLACK_TIMES = 4


class RankedExecutor(ModelExecutor):
    """Rank 0 in this process, the others in their own; all run the same steps.

    Every rank gets the whole plan and computes its part of each layer; rank 0 samples and the
    others get the sampled ids from it (``RankSampler``). What a rank fails of ends the step here,
    with its number and the cause, and the executor is not used afterwards.
    """

    def __init__(self, local: "KernelExecutor", ranks: RankProcesses) -> None:
        """Owns both. The ranks have met."""
        self._local = local
        self._ranks = ranks
        self.features = local.features
        self.sleep_levels = local.sleep_levels

    @property
    def num_live_rows(self) -> int:
        return self._local.num_live_rows

    @property
    def pids(self) -> tuple[int, ...]:
        """The other ranks' processes."""
        return self._ranks.pids

    def load(self, model: ModelSummary, source: Any) -> LoadReport:
        """Bytes of the checkpoint, which all ranks read, and this rank's seconds."""
        report, _ = self._together(Load(), lambda: self._local.load(model, source), Done)
        return report

    def kv_specs(self) -> Sequence[KVCacheSpec]:
        """What a rank keeps; all keep equally much."""
        return self._local.kv_specs()

    def available_kv_bytes(self, utilization: float) -> int:
        """Of the rank that has least, since all pools have equally many blocks."""
        own, others = self._together(
            AskMemory(utilization), lambda: self._local.available_kv_bytes(utilization), Memory
        )
        return min(own, *(other.num_bytes for other in others))

    def bind_kv(self, config: KVCacheConfig) -> None:
        self._together(BindKV(config), lambda: self._local.bind_kv(config), Done)

    def warmup(self) -> WarmupReport:
        report, _ = self._together(Warmup(), self._local.warmup, Done)
        return report

    def forward(self, step: SchedulerOutput) -> None:
        self._ranks.tell(Forward(step))
        self._in_step(lambda: self._local.forward(step))

    def sample(self, step: SchedulerOutput, mask: TokenMask | None = None) -> StepHandle:
        self._ranks.tell(Sample() if mask is None else Sample(list(mask.rows), mask.bits))
        return _RankedHandle(self._in_step(lambda: self._local.sample(step, mask)), self._explain)

    def sleep(self, level: int) -> None:
        """All ranks, or the executor is not used afterwards."""
        self._in_move(lambda: self._together(Sleep(level), lambda: self._local.sleep(level), Done))

    def wake(self, tags: Sequence[str]) -> Sequence[str]:
        """As ``sleep``."""
        asleep, _ = self._in_move(
            lambda: self._together(Wake(list(tags)), lambda: self._local.wake(tags), Done)
        )
        return asleep

    def close(self) -> None:
        """Leave the group, so that ranks inside a collective get out of it, and end them."""
        self._ranks.stop()
        try:
            self._local.close()
        finally:
            self._ranks.close()

    def _together(
        self, command: Command, act: Callable[[], Result], kind: type[Reply]
    ) -> tuple[Result, list[Reply]]:
        """Do the same here and on all other ranks; all results."""
        began = time.monotonic()
        self._ranks.tell(command)
        own = self._explain(act)
        slack = _SLACK_S + _SLACK_TIMES * (time.monotonic() - began)
        return own, self._ranks.answers(kind, slack)

    def _in_step(self, act: Callable[[], Result]) -> Result:
        """What all ranks do, or none can go on: even lack of memory, which one alone survives."""
        try:
            return self._explain(act)
        except OutOfMemoryError as error:
            raise RankFailed(f"rank 0: {error}") from error

    def _in_move(self, act: Callable[[], Result]) -> Result:
        """As ``_in_step``; after any refusal some ranks have moved, some have not or are gone."""
        try:
            return self._in_step(act)
        except RankFailed:
            raise
        except CardanError as error:
            raise RankFailed(f"the ranks did not move together: {error}") from error

    def _explain(self, act: Callable[[], Result]) -> Result:
        try:
            return act()
        except Exception as error:
            raise self._ranks.explained(error) from error


class _RankedHandle(StepHandle):
    """This rank's results; a failure names the rank that is its cause."""

    def __init__(
        self,
        local: StepHandle,
        explain: Callable[[Callable[[], ModelRunnerOutput]], ModelRunnerOutput],
    ) -> None:
        self._local = local
        self._explain = explain

    def done(self) -> bool:
        return self._local.done()

    def result(self) -> ModelRunnerOutput:
        return self._explain(self._local.result)
