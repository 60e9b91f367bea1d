"""The child's side of ``ProcessClient``."""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable

from cardan.core.engine.client import EngineParts
from cardan.core.engine.host_heap import give_back_freed_memory
from cardan.core.engine.loop import EngineLoop
from cardan.core.engine.messages import Answered, Beat, Failed, Outputs, Ready, Shutdown
from cardan.core.engine.wire import Connection
from cardan.core.types.errors import CardanError, EngineDeadError
from cardan.core.types.outputs import StepOutputs

BEAT_SECONDS = 1.0


def receive_config(sock: socket.socket) -> bytes:
    """The parent's first word, before any message."""
    length = int.from_bytes(_read_exactly(sock, 4), "little")
    return _read_exactly(sock, length)


def _read_exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = sock.recv(count - len(data))
        if not part:
            raise EOFError("the parent process is gone")
        data += part
    return data


def run_engine(sock: socket.socket, build: Callable[[], EngineParts]) -> int:
    """Build an engine, serve the peer of ``sock`` until it says so or is gone; an exit code."""
    # The parent tells this process when to stop; a Ctrl-C of the terminal is for the parent.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(sock)
    try:
        parts = build()
    except Exception as error:
        is_config = isinstance(error, CardanError)
        text = str(error) if is_config else f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError):
            connection.send(Failed(text, is_config))
        if not is_config:
            raise
        return 1
    return _Server(connection, parts).run()


class _Server:
    """Threads around the loop: one receives commands, one beats, the main one computes."""

    def __init__(self, connection: Connection, parts: EngineParts) -> None:
        self._connection = connection
        self._parts = parts
        self._done = threading.Event()
        self._loop = EngineLoop(
            parts.engine,
            self._emit,
            parts.observer,
            parts.reset_prefix_cache,
            self._answer,
            give_back_freed_memory,
        )

    def run(self) -> int:
        signal.signal(signal.SIGTERM, lambda *_args: self._loop.submit(Shutdown()))
        for target in (self._receive, self._beat):
            threading.Thread(target=target, daemon=True).start()
        reason = "the engine was shut down"
        try:
            self._connection.send(Ready(self._parts.info))
            self._loop.run()
        except EngineDeadError as error:
            reason = str(error)
            with contextlib.suppress(OSError):
                self._connection.send(Failed(reason))
            return 1
        except OSError:
            return 0  # the parent is gone, and with it everybody who waits for outputs
        finally:
            try:
                self._parts.close(reason)
            finally:
                self._done.set()
        return 0

    def _emit(self, outputs: StepOutputs) -> None:
        with contextlib.suppress(OSError):
            self._connection.send(Outputs(outputs))

    def _answer(self, answer: Answered) -> None:
        with contextlib.suppress(OSError):
            self._connection.send(answer)

    def _receive(self) -> None:
        for message in self._connection.receive():
            self._loop.submit(message)
        # The parent is gone. A step or a device that hangs must not keep this process alive.
        self._loop.submit(Shutdown())
        if not self._done.wait(5.0):
            os._exit(1)

    def _beat(self) -> None:
        while not self._done.wait(BEAT_SECONDS):
            try:
                beat = Beat(self._loop.progress_age, self._parts.observer.report())
                self._connection.send(beat)
            except OSError:
                return
