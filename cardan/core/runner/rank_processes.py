"""The processes of an executor's further ranks: starting, hearing and ending them."""

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from cardan.core.interfaces.errors import CardanError, ConfigError
from cardan.core.runner.rank_channel import RankChannel
from cardan.core.runner.rank_messages import (
    ANSWERS,
    Answer,
    Command,
    Failed,
    Opened,
    RankOrder,
    Stop,
    encode,
)

Result = TypeVar("Result")
Reply = TypeVar("Reply", bound=Answer)

# Seconds for a process to start and open its device.
_START_S = 180.0
# Seconds in which a rank must take a message, and in which all must meet.
_PATIENCE_S = 60.0
# Seconds that ranks have to say why they failed, after a failure that may be due to them.
_LAST_WORDS_S = 2.0
# Seconds to free a device and end.
_END_S = 10.0


class RankFailed(CardanError):
    """A rank failed, died or got stuck; the message names it and the cause."""


@dataclass(frozen=True, slots=True)
class _Rank:
    number: int
    process: "subprocess.Popen[bytes]"
    channel: RankChannel

    def exit_text(self) -> str:
        try:
            code = self.process.wait(_LAST_WORDS_S)
        except subprocess.TimeoutExpired:
            return f"rank {self.number} has closed its connection"
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"rank {self.number} was ended by {signal.Signals(-code).name}"
        return f"rank {self.number} exited with code {code}"


class RankProcesses:
    """Ranks 1 and above, each a child process. One thread uses it.

    A child ends when the socket to it does, so none outlives this process.
    """

    def __init__(
        self, command: Sequence[str], patience_s: float = _PATIENCE_S, end_s: float = _END_S
    ) -> None:
        """``command`` is started once a rank, with a descriptor of its socket as last argument.

        ``patience_s``: how long a rank may take no message, and how long they may take to meet;
        ``end_s``: how long one may take to end.
        """
        self._command = tuple(command)
        self._patience_s = patience_s
        self._end_s = end_s
        self._ranks: list[_Rank] = []
        self._failures: dict[int, Failed] = {}

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(rank.process.pid for rank in self._ranks)

    def start(self, order: RankOrder, environment: Mapping[str, str]) -> None:
        """Start one rank; does not wait for it."""
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as on_error:
            on_error.callback(ours.close)
            process = subprocess.Popen(
                [*self._command, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                # Signals of the terminal are for the process that ends the others.
                start_new_session=True,
            )
            on_error.pop_all()
        self._ranks.append(_Rank(order.rank, process, RankChannel(ours, self._patience_s)))
        self._send(self._ranks[-1], encode(order))

    def await_opened(self) -> None:
        """Wait until all have opened their devices.

        Raises:
            ConfigError: a rank complains of its configuration.
            RankFailed: one could not start otherwise, or not in time.
        """
        self.answers(Opened, _START_S)

    def tell(self, command: Command) -> None:
        """Send to all ranks.

        Raises:
            ConfigError, RankFailed: a rank is gone, or takes no messages.
        """
        body = encode(command)
        for rank in self._ranks:
            self._send(rank, body)

    def answers(self, kind: type[Reply], timeout_s: float) -> list[Reply]:
        """One answer of each rank, in their order.

        Raises:
            ConfigError, RankFailed: a rank failed or did not answer in time.
        """
        until = time.monotonic() + timeout_s
        found: list[Reply] = []
        for rank in self._ranks:
            answer = self._receive(rank, max(0.0, until - time.monotonic()))
            if not isinstance(answer, kind):
                raise self._failure_of(rank, answer, timeout_s)
            found.append(answer)
        return found

    def during(self, work: Callable[[], Result]) -> Result:
        """Do what blocks until all ranks take part, such as meeting them.

        Raises:
            ConfigError, RankFailed: a rank failed meanwhile, or it took too long. The thread that
                does the work is then left behind.
        """
        results: list[Result] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                results.append(work())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run, name="cardan-ranks", daemon=True)
        thread.start()
        until = time.monotonic() + self._patience_s
        while thread.is_alive():
            thread.join(0.05)
            for rank in self._ranks:
                if thread.is_alive() and rank.channel.has_input():
                    raise self._failure_of(rank, self._receive(rank, 1.0), 1.0)
            if thread.is_alive() and time.monotonic() > until:
                raise RankFailed(
                    f"the ranks did not meet within {self._patience_s:g} s: one of them is "
                    "stopped, stuck or swamped"
                )
        if errors:
            raise self.explained(errors[0])
        return results[0]

    def explained(self, error: BaseException) -> BaseException:
        """The failure of a rank that is behind ``error``, or ``error`` if there is none.

        What this rank complains of itself needs no explanation.
        """
        if isinstance(error, ConfigError | RankFailed) or not isinstance(error, Exception):
            return error
        until = time.monotonic() + _LAST_WORDS_S
        dead = None
        for rank in self._ranks:
            with contextlib.suppress(TimeoutError):
                answer = self._await_failure(rank, until)
                if answer is None:
                    dead = dead or rank
                    # Those that failed because of it have nothing to add.
                    break
        if dead is not None:
            return RankFailed(dead.exit_text())
        if not self._failures:
            return error
        number, failure = min(self._failures.items(), key=lambda item: item[1].at)
        return _raised(number, failure)

    def stop(self) -> None:
        """Ask all to end; does not wait for it."""
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                rank.channel.send(encode(Stop()), _LAST_WORDS_S)

    def close(self) -> None:
        """End all; those that take longer than they may are killed. Idempotent."""
        self.stop()
        ranks, self._ranks = self._ranks, []
        until = time.monotonic() + self._end_s
        for rank in ranks:
            try:
                rank.process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                rank.process.kill()
                rank.process.wait()
            rank.channel.close()

    def _send(self, rank: _Rank, body: bytes) -> None:
        try:
            rank.channel.send(body)
        except TimeoutError as error:
            raise RankFailed(
                f"rank {rank.number} took no message for {self._patience_s:g} s: it is stopped "
                "or stuck"
            ) from error
        except OSError as error:
            raise self.explained(error) from error

    def _receive(self, rank: _Rank, timeout_s: float) -> Answer | None:
        """None: it is gone. A failure is kept.

        Raises:
            RankFailed: nothing came in time, or nothing that can be read.
        """
        try:
            body = rank.channel.receive(timeout_s)
            answer = None if body is None else ANSWERS.decode(body)
        except TimeoutError:
            raise RankFailed(
                f"rank {rank.number} did not answer in time ({timeout_s:.1f} s): it is stopped, "
                "stuck or swamped"
            ) from None
        except msgspec.DecodeError as error:
            raise RankFailed(f"rank {rank.number} answered what cannot be read") from error
        if isinstance(answer, Failed):
            self._failures[rank.number] = answer
        return answer

    def _await_failure(self, rank: _Rank, until: float) -> Failed | None:
        """Its failure, whatever it says before; None: it is gone without a word.

        Raises:
            TimeoutError: it goes on.
        """
        while rank.number not in self._failures:
            body = rank.channel.receive(max(0.0, until - time.monotonic()))
            if body is None:
                return None
            answer = ANSWERS.decode(body)
            if isinstance(answer, Failed):
                self._failures[rank.number] = answer
        return self._failures[rank.number]

    def _failure_of(self, rank: _Rank, answer: Answer | None, timeout_s: float) -> Exception:
        if isinstance(answer, Failed):
            cause = self.explained(RuntimeError("another rank failed"))
            return cause if isinstance(cause, Exception) else _raised(rank.number, answer)
        if answer is None:
            return RankFailed(rank.exit_text())
        return RankFailed(f"rank {rank.number} answered {type(answer).__name__} out of turn")


def _raised(number: int, failure: Failed) -> Exception:
    kind = ConfigError if failure.is_config else RankFailed
    return kind(f"rank {number}: {failure.message}")
