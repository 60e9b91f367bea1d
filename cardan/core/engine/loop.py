"""Calls the engine until told to stop. Runs on a thread, or as the whole of a process."""

import logging
import queue
import time
from collections.abc import Callable
from typing import Protocol

from cardan.core.engine.engine import Engine
from cardan.core.engine.messages import (
    Abort,
    Answered,
    Command,
    ResetPrefixCache,
    Shutdown,
    Sleep,
    Submit,
    Wake,
)
from cardan.core.engine.sleeper import Sleeper
from cardan.core.types.engine_info import PluginReport
from cardan.core.types.errors import EngineDeadError
from cardan.core.types.outputs import EngineStats, Finish, StepOutputs
from cardan.core.types.request import EngineRequest, FinishReason

logger = logging.getLogger("cardan.engine")

# Seconds after which an idle loop reports that it is well, and rests.
IDLE_REPORT_SECONDS = 1.0


class Observer(Protocol):
    """Who is told of finished steps, and knows what plugins say (plugin hooks)."""

    def step_completed(self, stats: EngineStats) -> None: ...

    def flush(self) -> None:
        """The clients were told of all that has ended so far."""

    def report(self) -> PluginReport:
        """What plugins last said of the engine; from any thread, and at once."""


class Unobserved:
    """Nobody is told, and nobody says anything."""

    def step_completed(self, stats: EngineStats) -> None: ...

    def flush(self) -> None: ...

    def report(self) -> PluginReport:
        return PluginReport()


class EngineLoop:
    """Feeds commands to an engine between steps and hands its outputs to ``emit``.

    ``submit`` is called from any thread; everything else happens on the thread of ``run``.
    """

    def __init__(
        self,
        engine: Engine,
        emit: Callable[[StepOutputs], None],
        observer: Observer,
        reset_prefix_cache: Callable[[], None],
        answer: Callable[[Answered], None],
        rest: Callable[[], None],
    ) -> None:
        """``answer`` is told what became of each ``Sleep`` and ``Wake``. ``rest`` is called once in
        each idle time that lasts, after work; its milliseconds delay no request that is there."""
        self._engine = engine
        self._emit = emit
        self._observer = observer
        self._reset_prefix_cache = reset_prefix_cache
        self._sleeper = Sleeper(engine, reset_prefix_cache, answer)
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._rest = rest
        self._has_worked = True
        self._is_stopping = False
        self._last_progress = time.monotonic()

    def submit(self, command: Command) -> None:
        self._commands.put(command)

    @property
    def progress_age(self) -> float:
        """Seconds since the loop last finished a step or found itself idle; 0 while the engine
        falls asleep or wakes."""
        if self._sleeper.is_moving:
            return 0.0
        return time.monotonic() - max(self._last_progress, self._sleeper.moved_at)

    def run(self) -> None:
        """Return after a ``Shutdown``.

        Raises:
            EngineDeadError: a step failed; every sequence has been ended with the cause.
        """
        try:
            while not self._is_stopping:
                self._take_commands()
                if self._is_stopping:
                    break
                self._advance()
        except Exception as error:
            logger.exception("the engine failed")
            message = f"the engine failed: {type(error).__name__}: {error}"
            self._fail_all(message)
            raise EngineDeadError(message) from error
        self._fail_all("the engine was shut down")

    def _fail_all(self, message: str) -> None:
        self._emit(self._engine.fail_all(message))
        self._observer.flush()

    def _advance(self) -> None:
        outputs = self._engine.step()
        self._last_progress = time.monotonic()
        self._emit(outputs)
        self._sleeper.advance()
        self._last_progress = time.monotonic()
        if outputs.stats is not None:
            self._observer.step_completed(outputs.stats)
        self._observer.flush()

    def _take_commands(self) -> None:
        if not self._engine.has_work:
            try:
                self._apply(self._commands.get(timeout=IDLE_REPORT_SECONDS))
            except queue.Empty:
                self._rest_after_work()
                return
        while True:
            try:
                self._apply(self._commands.get_nowait())
            except queue.Empty:
                return

    def _rest_after_work(self) -> None:
        if self._has_worked:
            self._has_worked = False
            self._rest()

    def _apply(self, command: Command) -> None:
        self._has_worked = True
        match command:
            case Submit(request):
                self._add(request)
            case Abort(keys):
                self._engine.abort(keys)
            case ResetPrefixCache():
                self._reset_prefix_cache()
            case Sleep() | Wake():
                self._sleeper.take(command)
            case Shutdown():
                self._is_stopping = True

    def _add(self, request: EngineRequest) -> None:
        refusal = self._sleeper.refusal
        if refusal is None:
            self._engine.add(request)
            return
        finish = Finish(FinishReason.ERROR, message=refusal, kind="asleep")
        keys = range(request.key, request.key + request.num_sequences)
        self._emit(StepOutputs(finished=dict.fromkeys(keys, finish)))
