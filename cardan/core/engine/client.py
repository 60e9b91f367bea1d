"""How the front talks to an engine, wherever it runs."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from cardan.core.engine.engine import Engine
from cardan.core.engine.host_heap import give_back_freed_memory
from cardan.core.engine.loop import EngineLoop, Observer
from cardan.core.engine.messages import (
    Abort,
    ResetPrefixCache,
    Shutdown,
    SleepMode,
    Submit,
)
from cardan.core.engine.tickets import Tickets
from cardan.core.types.engine_info import EngineHealth, EngineInfo, PluginReport, running_health
from cardan.core.types.errors import EngineDeadError
from cardan.core.types.outputs import StepOutputs
from cardan.core.types.request import EngineRequest


class OutputSink(Protocol):
    """Receives an engine's outputs, on a thread of the client."""

    def on_outputs(self, outputs: StepOutputs) -> None: ...

    def on_death(self, reason: str) -> None:
        """No further outputs will come; everything unfinished is lost."""


class EngineClient(Protocol):
    """One engine. ``info`` is known once the client exists: it waits until the engine is ready."""

    info: EngineInfo

    def connect(self, sink: OutputSink) -> None:
        """Where outputs go; called once, before the first request."""

    def submit(self, request: EngineRequest) -> None:
        """Hand a request over.

        Raises:
            EngineDeadError: the engine has died.
        """

    def abort(self, keys: Sequence[int]) -> None: ...

    def reset_prefix_cache(self) -> None: ...

    @property
    def sleep_level(self) -> int:
        """What the engine sleeps at; 0: it is awake."""

    def sleep(self, level: int, mode: SleepMode) -> "Future[None]":
        """Have the engine fall asleep; done when it sleeps.

        The future's errors: ``UnsupportedError``, ``InputError``, ``RequestFailedError`` (the
        engine goes on as before), ``EngineDeadError``.
        """

    def wake_up(self, tags: Sequence[str] | None) -> "Future[None]":
        """Have it wake up, as far as ``tags`` go; None: entirely. Errors as for ``sleep``."""

    def health(self) -> EngineHealth: ...

    def close(self) -> None:
        """Stop the engine and free everything. Idempotent."""


@dataclass(frozen=True, slots=True)
class EngineParts:
    """A built engine and what belongs to it; ``close`` frees the device."""

    engine: Engine
    info: EngineInfo
    observer: Observer
    reset_prefix_cache: Callable[[], None]
    close: Callable[[str], None]


class InProcessClient:
    """Runs an engine on a thread of this process."""

    def __init__(self, build: Callable[[], EngineParts], step_timeout: float = 60.0) -> None:
        """Build and start. ``build`` runs on the engine's thread; what it raises is raised here.

        An interrupt waits for the end of ``build``: an interpreter that ends meanwhile would abort.
        """
        self._step_timeout = step_timeout
        self._sink: OutputSink | None = None
        self._loop: EngineLoop | None = None
        self._observer: Observer | None = None
        self._error: BaseException | None = None
        self._death: str | None = None
        self._is_unwanted = False
        self._tickets = Tickets()
        self._started = threading.Event()
        self._connected = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(build,), name="cardan-engine", daemon=True
        )
        try:
            self._thread.start()
            self._started.wait()
        except BaseException:
            self._is_unwanted = True
            if self._thread.ident is not None:
                self.close()
            raise
        if self._error is not None:
            raise self._error

    def connect(self, sink: OutputSink) -> None:
        self._sink = sink
        self._connected.set()

    def submit(self, request: EngineRequest) -> None:
        self._live_loop().submit(Submit(request))

    def abort(self, keys: Sequence[int]) -> None:
        if self._death is None:
            self._live_loop().submit(Abort(list(keys)))

    def reset_prefix_cache(self) -> None:
        self._live_loop().submit(ResetPrefixCache())

    @property
    def sleep_level(self) -> int:
        return self._tickets.level

    def sleep(self, level: int, mode: SleepMode) -> "Future[None]":
        command, future = self._tickets.sleep(level, mode)
        self._live_loop().submit(command)
        return future

    def wake_up(self, tags: Sequence[str] | None) -> "Future[None]":
        command, future = self._tickets.wake(tags)
        self._live_loop().submit(command)
        return future

    def health(self) -> EngineHealth:
        age = self._loop.progress_age if self._loop else 0.0
        if self._death is not None:
            return EngineHealth("dead", self._death, age)
        if age > self._step_timeout:
            return EngineHealth("stuck", f"no step has finished for {age:.0f} s", age)
        return running_health(age, self._observer.report() if self._observer else PluginReport())

    def close(self) -> None:
        self._connected.set()
        if self._loop is not None:
            self._loop.submit(Shutdown())
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _live_loop(self) -> EngineLoop:
        if self._death is not None or self._loop is None:
            raise EngineDeadError(self._death or "the engine was shut down")
        return self._loop

    def _emit(self, outputs: StepOutputs) -> None:
        if self._sink is not None:
            self._sink.on_outputs(outputs)

    def _run(self, build: Callable[[], EngineParts]) -> None:
        try:
            parts = build()
        except BaseException as error:
            self._error = error
            self._started.set()
            return
        if self._is_unwanted:
            parts.close("the engine is not wanted any more")
            return
        self.info = parts.info
        self._observer = parts.observer
        loop = EngineLoop(
            parts.engine,
            self._emit,
            parts.observer,
            parts.reset_prefix_cache,
            self._tickets.settle,
            give_back_freed_memory,
        )
        self._loop = loop
        self._started.set()
        self._connected.wait()
        reason = "the engine was shut down"
        try:
            loop.run()
        except EngineDeadError as error:
            reason = str(error)
        self._death = reason
        self._loop = None
        self._tickets.fail_all(reason)
        if self._sink is not None:
            self._sink.on_death(reason)
        parts.close(reason)
