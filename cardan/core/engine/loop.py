"""Calls the engine until told to stop. Runs on a thread, or as the whole of a process."""

import logging
import queue
import time
from collections.abc import Callable
from typing import Protocol

from cardan.core.engine.engine import Engine
from cardan.core.engine.messages import Abort, Command, ResetPrefixCache, Shutdown, Submit
from cardan.core.types.errors import EngineDeadError
from cardan.core.types.outputs import EngineStats, StepOutputs

logger = logging.getLogger("cardan.engine")

# Seconds after which an idle loop reports that it is well.
IDLE_REPORT_SECONDS = 1.0


class Observer(Protocol):
    """Who is told of finished steps (plugin hooks)."""

    def step_completed(self, stats: EngineStats) -> None: ...


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
    ) -> None:
        self._engine = engine
        self._emit = emit
        self._observer = observer
        self._reset_prefix_cache = reset_prefix_cache
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._is_stopping = False
        self._last_progress = time.monotonic()

    def submit(self, command: Command) -> None:
        self._commands.put(command)

    @property
    def progress_age(self) -> float:
        """Seconds since the loop last finished a step or found itself idle."""
        return time.monotonic() - self._last_progress

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
            self._emit(self._engine.fail_all(message))
            raise EngineDeadError(message) from error
        self._emit(self._engine.fail_all("the engine was shut down"))

    def _advance(self) -> None:
        outputs = self._engine.step()
        self._last_progress = time.monotonic()
        self._emit(outputs)
        if outputs.stats is not None:
            self._observer.step_completed(outputs.stats)

    def _take_commands(self) -> None:
        if not self._engine.has_work:
            try:
                self._apply(self._commands.get(timeout=IDLE_REPORT_SECONDS))
            except queue.Empty:
                return
        while True:
            try:
                self._apply(self._commands.get_nowait())
            except queue.Empty:
                return

    def _apply(self, command: Command) -> None:
        match command:
            case Submit(request):
                self._engine.add(request)
            case Abort(keys):
                self._engine.abort(keys)
            case ResetPrefixCache():
                self._reset_prefix_cache()
            case Shutdown():
                self._is_stopping = True
