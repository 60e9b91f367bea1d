"""Answers of an engine that callers wait for."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future

from cardan.core.engine.messages import Answered, Sleep, Wake
from cardan.core.interfaces.errors import UnsupportedError
from cardan.core.types.errors import EngineDeadError, InputError, RequestFailedError, shown

# Parts of an engine that wake up: the names that users of other engines know, and the executor's.
WAKE_TAGS = {"weights": "weights", "kv_cache": "kv"}


class Tickets:
    """Who waits for which answer. Any thread calls it.

    Attributes:
        level: what the engine sleeps at by its last answer; 0: it is awake.
    """

    def __init__(self) -> None:
        self.level = 0
        # Guards the three below.
        self._lock = threading.Lock()
        self._next = 0
        self._open: dict[int, Future[None]] = {}
        self._death: str | None = None

    def sleep(self, level: int, mode: str) -> tuple[Sleep, "Future[None]"]:
        """A command, and what is done when its answer has come.

        Raises:
            InputError: ``mode`` or ``level`` is none.
            EngineDeadError: the engine has died.
        """
        if type(level) is not int:
            raise InputError(f"level is {shown(level)}; it must be 1 or 2", "level")
        if mode == "wait":
            ticket, future = self._open_ticket()
            return Sleep(ticket, level, "wait"), future
        if mode == "abort":
            ticket, future = self._open_ticket()
            return Sleep(ticket, level, "abort"), future
        raise InputError(
            f"mode is {shown(mode)}; it must be wait, to let running requests end, or abort", "mode"
        )

    def wake(self, tags: Sequence[str] | None) -> tuple[Wake, "Future[None]"]:
        """As ``sleep``; None: all tags.

        Raises:
            InputError: an unknown tag.
            EngineDeadError: the engine has died.
        """
        names = list(WAKE_TAGS) if tags is None else list(tags)
        unknown = [name for name in names if name not in WAKE_TAGS]
        if unknown or not names or isinstance(tags, str):
            raise InputError(f"tags is {shown(tags)}; name any of {', '.join(WAKE_TAGS)}", "tags")
        ticket, future = self._open_ticket()
        return Wake(ticket, [WAKE_TAGS[name] for name in names]), future

    def _open_ticket(self) -> tuple[int, "Future[None]"]:
        future: Future[None] = Future()
        with self._lock:
            if self._death is not None:
                raise EngineDeadError(self._death)
            self._next += 1
            self._open[self._next] = future
            return self._next, future

    # -- from the engine ------------------------------------------------------------------------

    def settle(self, answer: Answered) -> None:
        """Tell whoever waits; they may have left."""
        self.level = answer.level
        with self._lock:
            future = self._open.pop(answer.ticket, None)
        if future is None or not future.set_running_or_notify_cancel():
            return
        if answer.refusal is None:
            future.set_result(None)
        else:
            future.set_exception(_error_of(answer, answer.refusal))

    def fail_all(self, reason: str) -> None:
        """The engine has died."""
        self.level = 0
        with self._lock:
            self._death = reason
            futures = list(self._open.values())
            self._open.clear()
        for future in futures:
            if future.set_running_or_notify_cancel():
                future.set_exception(EngineDeadError(reason))


def _error_of(answer: Answered, message: str) -> Exception:
    match answer.kind:
        case "unsupported":
            return UnsupportedError(message)
        case "invalid":
            return InputError(message)
        case _:
            return RequestFailedError(message)
