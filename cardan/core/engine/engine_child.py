"""The process of an engine, from its start to its first word."""

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence

from cardan.core.engine.messages import Failed, Ready
from cardan.core.engine.wire import Connection
from cardan.core.types.engine_info import EngineInfo
from cardan.core.types.errors import ConfigError, EngineDeadError


class EngineChild:
    """Starts ``command`` with one end of a socket pair as its last argument (a descriptor).

    The child reads its configuration from the socket, answers ``Ready`` or ``Failed``, and ends
    when the socket does, so that it never outlives this process.
    """

    def __init__(self, command: Sequence[str], config: bytes, env: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            os.set_inheritable(theirs.fileno(), True)
            self.process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **env},
                stdin=subprocess.DEVNULL,
                # Signals of the terminal are the server's to handle.
                start_new_session=True,
            )
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
        self.process.wait()
        self.connection.close()
        if isinstance(message, Failed):
            error = ConfigError if message.is_config else EngineDeadError
            raise error(message.message)
        raise EngineDeadError(self.exit_text())

    def kill(self) -> None:
        self.process.kill()

    def exit_text(self) -> str:
        """How the process, which must have ended, did so."""
        code = self.process.returncode
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"the engine process was ended by {signal.Signals(-code).name}"
        return f"the engine process exited with code {code}"
