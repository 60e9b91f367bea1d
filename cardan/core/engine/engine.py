"""The engine core: schedule, execute, update."""

import logging
from collections import deque
from collections.abc import Iterable

from cardan.core.interfaces.errors import OutOfMemoryError
from cardan.core.interfaces.executor import ModelExecutor, StepHandle
from cardan.core.scheduler.scheduler import Scheduler
from cardan.core.types.errors import InputError, QueueFullError
from cardan.core.types.outputs import ErrorKind, Finish, StepOutputs
from cardan.core.types.request import EngineRequest, FinishReason
from cardan.core.types.step import SchedulerOutput

logger = logging.getLogger("cardan.engine")


class Engine:
    """Drives one scheduler and one executor. One thread calls it.

    Up to ``async_depth`` further steps are planned while one runs; their sampled tokens stay on
    the device. With depth 0 each call of ``step`` plans, runs and books one step.
    """

    def __init__(self, scheduler: Scheduler, executor: ModelExecutor, async_depth: int) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._async_depth = async_depth
        self._in_flight: deque[tuple[SchedulerOutput, StepHandle]] = deque()
        self._rejected: dict[int, Finish] = {}

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or bool(self._in_flight) or bool(self._rejected)

    @property
    def num_live(self) -> int:
        """Sequences that have not ended."""
        return self._scheduler.num_live

    def add(self, request: EngineRequest) -> None:
        """Take a request; a refusal is reported among the next outputs, under all its keys."""
        try:
            self._scheduler.add(request)
        except InputError as error:
            self._reject(request, str(error), "invalid", error.field)
        except QueueFullError as error:
            self._reject(request, str(error), "queue_full", None)

    def abort(self, keys: Iterable[int]) -> None:
        for key in keys:
            self._scheduler.abort(key)

    def abort_all(self) -> None:
        """End every sequence as its client would."""
        self._scheduler.abort_all()

    def sleep_levels(self) -> tuple[int, ...]:
        """Levels of ``sleep``; none where the executor cannot."""
        return tuple(self._executor.sleep_levels)

    def sleep(self, level: int) -> None:
        """As ``ModelExecutor.sleep``; there is no work."""
        self._executor.sleep(level)

    def wake(self, tags: tuple[str, ...]) -> tuple[str, ...]:
        """As ``ModelExecutor.wake``."""
        return tuple(self._executor.wake(tags))

    def fail_all(self, message: str) -> StepOutputs:
        """End every sequence with an error; the engine is not used afterwards."""
        self._in_flight.clear()
        self._scheduler.fail_all(message)
        return self._take_outputs()

    def step(self) -> StepOutputs:
        """Advance by one step and return what the clients need to know."""
        while len(self._in_flight) <= self._async_depth:
            plan = self._scheduler.schedule()
            if plan is None:
                break
            handle = self._run(plan)
            if handle is not None:
                self._in_flight.append((plan, handle))
        if self._in_flight:
            plan, handle = self._in_flight.popleft()
            self._scheduler.update(plan, handle.result())
        return self._take_outputs()

    def _run(self, plan: SchedulerOutput) -> StepHandle | None:
        """Launch a step; None if it does not fit into memory, which ends its sequences alone."""
        try:
            self._executor.forward(plan)
            return self._executor.sample(plan)
        except OutOfMemoryError as error:
            logger.error("%d sequences are ended: %s", len(plan.rows), error)
            self._scheduler.fail(plan, str(error))
            return None

    def _take_outputs(self) -> StepOutputs:
        outputs = self._scheduler.take_outputs()
        rejected, self._rejected = self._rejected, {}
        outputs.finished.update(rejected)
        return outputs

    def _reject(
        self, request: EngineRequest, message: str, kind: ErrorKind, field: str | None
    ) -> None:
        for key in range(request.key, request.key + request.num_sequences):
            self._rejected[key] = Finish(
                FinishReason.ERROR, message=message, kind=kind, field=field
            )
