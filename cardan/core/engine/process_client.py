"""An engine in a process of its own."""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future

from cardan.core.engine.client import OutputSink
from cardan.core.engine.engine_child import EngineChild
from cardan.core.engine.messages import (
    Abort,
    Answered,
    Beat,
    Failed,
    Outputs,
    ResetPrefixCache,
    Shutdown,
    SleepMode,
    Submit,
)
from cardan.core.engine.tickets import Tickets
from cardan.core.types.engine_info import EngineHealth, PluginReport, running_health
from cardan.core.types.errors import EngineDeadError
from cardan.core.types.request import EngineRequest

logger = logging.getLogger("cardan.engine")

# The engine's process beats every second; this many seconds without a beat: stopped or swamped.
BEAT_TIMEOUT = 6.0


class ProcessClient:
    """Talks to a child; owns it from here on. Blocks until it is ready."""

    def __init__(self, child: EngineChild, step_timeout: float = 60.0) -> None:
        """
        Raises:
            ConfigError, EngineDeadError: as ``EngineChild.await_ready``.
        """
        self._child = child
        self._step_timeout = step_timeout
        self._sink: OutputSink | None = None
        self._death: str | None = None
        self._reason_of_kill: str | None = None
        self._is_closing = False
        self._step_age = 0.0
        self._plugins = PluginReport()
        self._tickets = Tickets()
        self._connected = threading.Event()
        # A child that reads nothing must hold up nobody who sends: callers run event loops.
        self._outbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.info = child.await_ready()
        self._last_beat = time.monotonic()
        self._reader = threading.Thread(target=self._read, name="cardan-engine-reader", daemon=True)
        self._writer = threading.Thread(
            target=self._write, name="cardan-engine-writer", daemon=True
        )
        self._reader.start()
        self._writer.start()

    @property
    def pid(self) -> int:
        return self._child.process.pid

    def connect(self, sink: OutputSink) -> None:
        self._sink = sink
        self._connected.set()

    def submit(self, request: EngineRequest) -> None:
        self._send(Submit(request))

    def abort(self, keys: Sequence[int]) -> None:
        with contextlib.suppress(EngineDeadError):
            self._send(Abort(list(keys)))

    def reset_prefix_cache(self) -> None:
        self._send(ResetPrefixCache())

    @property
    def sleep_level(self) -> int:
        return self._tickets.level

    def sleep(self, level: int, mode: SleepMode) -> "Future[None]":
        command, future = self._tickets.sleep(level, mode)
        self._send(command)
        return future

    def wake_up(self, tags: Sequence[str] | None) -> "Future[None]":
        command, future = self._tickets.wake(tags)
        self._send(command)
        return future

    def health(self) -> EngineHealth:
        silence = time.monotonic() - self._last_beat
        if self._death is not None:
            return EngineHealth("dead", self._death, silence)
        age = self._step_age + silence
        if age > self._step_timeout:
            return EngineHealth("stuck", f"no step has finished for {age:.0f} s", age)
        if silence > BEAT_TIMEOUT:
            return EngineHealth("stuck", f"no sign of life for {silence:.0f} s", silence)
        return running_health(age, self._plugins)

    def kill(self, reason: str) -> None:
        """End the child at once; ``reason`` is what everybody is told."""
        self._reason_of_kill = reason
        self._child.kill()

    def close(self) -> None:
        self._is_closing = True
        self._connected.set()
        self._child.end(Shutdown())
        self._child.connection.close()
        if self._reader is not threading.current_thread():
            self._reader.join()
            self._writer.join()

    def _send(self, message: object) -> None:
        if self._death is not None:
            raise EngineDeadError(self._death)
        self._outbox.put(message)

    def _write(self) -> None:
        """Send what is put into the outbox, until None comes or the child is gone.

        A message that cannot be sent is answered by the child's death, which the reader reports.
        """
        while (message := self._outbox.get()) is not None:
            try:
                self._child.connection.send(message)
            except OSError:
                return

    def _read(self) -> None:
        self._connected.wait()
        try:
            reason = self._receive()
        except Exception as error:
            # Nobody would hear of this engine again.
            logger.exception("an engine's message could not be handled")
            reason = f"a message of the engine could not be handled: {error}"
            self._child.kill()
        # Its device may be what failed, and then closing it may never return.
        self._child.end()
        reason = self._reason_of_kill or reason
        if reason is None:
            reason = "the engine was shut down" if self._is_closing else self._child.exit_text()
        if not self._is_closing:
            logger.error(reason)
        self._death = reason
        self._child.connection.close()
        self._outbox.put(None)
        self._tickets.fail_all(reason)
        if self._sink is not None:
            self._sink.on_death(reason)

    def _receive(self) -> str | None:
        """Hand messages on until the last; why the engine failed, if it said so."""
        for message in self._child.messages:
            self._last_beat = time.monotonic()
            match message:
                case Outputs(outputs):
                    self._step_age = 0.0
                    if self._sink is not None:
                        self._sink.on_outputs(outputs)
                case Beat(step_age, plugins):
                    self._step_age = step_age
                    self._plugins = plugins
                case Answered():
                    self._tickets.settle(message)
                case Failed(text):
                    # It is still to end, but nothing sent to it now would be answered.
                    self._death = text
                    return text
        return None
