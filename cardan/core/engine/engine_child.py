"""The process of an engine, from its start to its first word."""

import contextlib
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence

from cardan.core.engine.messages import Failed, Ready
from cardan.core.engine.wire import Connection
from cardan.core.types.engine_info import EngineInfo
from cardan.core.types.errors import ConfigError, EngineDeadError


class EngineChild:
    """Starts ``command`` with one end of a socket pair as its last argument (a descriptor).

    The child reads its configuration from the socket, answers ``Ready`` or ``Failed``, and ends
    when the socket does, so that it never outlives this process. Once it is to end it gets
    ``end_timeout`` seconds to free its device.
    """

    def __init__(
        self,
        command: Sequence[str],
        config: bytes,
        env: Mapping[str, str],
        end_timeout: float = 10.0,
    ) -> None:
        self._end_timeout = end_timeout
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as on_error:
            on_error.callback(ours.close)
            os.set_inheritable(theirs.fileno(), True)
            self.process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **env},
                stdin=subprocess.DEVNULL,
                # Signals of the terminal are the server's to handle.
                start_new_session=True,
            )
            on_error.pop_all()
        self.connection = Connection(ours)
        with contextlib.suppress(OSError):  # a child that died at once says so below
            ours.sendall(len(config).to_bytes(4, "little") + config)
        self.messages = self.connection.receive()

    def await_ready(self) -> EngineInfo:
        """Wait for the child's first word.

        Raises:
            ConfigError: the child complains of its configuration.
            EngineDeadError: it could not start otherwise, or ended.
        """
        message = None
        try:
            for message in self.messages:
                if isinstance(message, Ready):
                    return message.info
                if isinstance(message, Failed):
                    break
        except BaseException:
            self.kill()
            raise
        self.end()
        self.connection.close()
        if isinstance(message, Failed):
            error = ConfigError if message.is_config else EngineDeadError
            raise error(message.message)
        raise EngineDeadError(self.exit_text())

    def kill(self) -> None:
        self.process.kill()

    def end(self, word: object = None) -> None:
        """Wait for a process that should end by itself, or because of ``word``, a message.

        One that takes longer is killed, also while it does not even take the message.
        """
        killer = threading.Timer(self._end_timeout, self.process.kill)
        killer.daemon = True
        killer.start()
        try:
            if word is not None:
                with contextlib.suppress(OSError):
                    self.connection.send(word)
            self.process.wait()
        finally:
            killer.cancel()

    def exit_text(self) -> str:
        """How the process, which must have ended, did so."""
        code = self.process.returncode
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"the engine process was ended by {signal.Signals(-code).name}"
        return f"the engine process exited with code {code}"
