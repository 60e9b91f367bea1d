"""An engine in a process of its own."""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence

from cardan.core.engine.client import OutputSink
from cardan.core.engine.messages import (
    Abort,
    Beat,
    Failed,
    Outputs,
    Ready,
    ResetPrefixCache,
    Shutdown,
    Submit,
)
from cardan.core.engine.wire import Connection
from cardan.core.types.engine_info import EngineHealth, EngineInfo
from cardan.core.types.errors import ConfigError, EngineDeadError
from cardan.core.types.request import EngineRequest

logger = logging.getLogger("cardan.engine")

# The engine's process beats every second; this many seconds without a beat: stopped or swamped.
BEAT_TIMEOUT = 6.0
CLOSE_TIMEOUT = 10.0


class ProcessClient:
    """Starts ``command`` with one end of a socket pair as its last argument (a descriptor).

    The child reads its configuration from the socket, answers ``Ready`` or ``Failed``, and ends
    when the socket does, so that it never outlives this process.
    """

    def __init__(
        self,
        command: Sequence[str],
        config: bytes,
        env: Mapping[str, str],
        step_timeout: float = 60.0,
    ) -> None:
        self._step_timeout = step_timeout
        self._sink: OutputSink | None = None
        self._death: str | None = None
        self._is_closing = False
        self._last_beat = time.monotonic()
        self._step_age = 0.0
        self._connected = threading.Event()
        ours, theirs = socket.socketpair()
        with theirs:
            os.set_inheritable(theirs.fileno(), True)
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **env},
                stdin=subprocess.DEVNULL,
                # Signals of the terminal are the server's to handle.
                start_new_session=True,
            )
        ours.sendall(len(config).to_bytes(4, "little") + config)
        self._connection = Connection(ours)
        self._messages = self._connection.receive()
        self.info = self._await_ready()
        self._reader = threading.Thread(target=self._read, name="cardan-engine-reader", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

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

    def health(self) -> EngineHealth:
        silence = time.monotonic() - self._last_beat
        if self._death is not None:
            return EngineHealth("dead", self._death, silence)
        if silence > BEAT_TIMEOUT:
            return EngineHealth("stuck", f"no sign of life for {silence:.0f} s", silence)
        age = self._step_age + silence
        if age > self._step_timeout:
            return EngineHealth("stuck", f"no step has finished for {age:.0f} s", age)
        return EngineHealth("ready", "", age)

    def close(self) -> None:
        self._is_closing = True
        self._connected.set()
        with contextlib.suppress(EngineDeadError):
            self._send(Shutdown())
        try:
            self._process.wait(CLOSE_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
        self._connection.close()
        if self._reader is not threading.current_thread():
            self._reader.join()

    def _await_ready(self) -> EngineInfo:
        """Wait for the child's first word; raise its complaint here."""
        message = None
        try:
            for message in self._messages:
                if isinstance(message, Ready):
                    return message.info
                if isinstance(message, Failed):
                    break
        except BaseException:
            self._process.kill()
            raise
        self._process.wait()
        self._connection.close()
        if isinstance(message, Failed):
            error = ConfigError if message.is_config else EngineDeadError
            raise error(message.message)
        raise EngineDeadError(_exit_text(self._process.returncode))

    def _send(self, message: object) -> None:
        if self._death is not None:
            raise EngineDeadError(self._death)
        try:
            self._connection.send(message)
        except OSError as error:
            raise EngineDeadError("the engine process is gone") from error

    def _read(self) -> None:
        self._connected.wait()
        reason: str | None = None
        for message in self._messages:
            self._last_beat = time.monotonic()
            match message:
                case Outputs(outputs):
                    self._step_age = 0.0
                    if self._sink is not None:
                        self._sink.on_outputs(outputs)
                case Beat(step_age):
                    self._step_age = step_age
                case Failed(text):
                    reason = text
        self._process.wait()
        if reason is None:
            reason = "the engine was shut down"
            if not self._is_closing:
                reason = _exit_text(self._process.returncode)
                logger.error(reason)
        self._death = reason
        if self._sink is not None:
            self._sink.on_death(reason)


def _exit_text(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"the engine process was ended by {signal.Signals(-code).name}"
    return f"the engine process exited with code {code}"
