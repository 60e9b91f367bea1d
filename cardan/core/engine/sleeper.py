"""Whether an engine takes requests: it is awake, falls asleep, or sleeps."""

import logging
import time
from collections.abc import Callable
from typing import Protocol

from cardan.core.engine.messages import Answered, RefusalKind, Sleep, Wake
from cardan.core.interfaces.errors import (
    CardanError,
    ConfigError,
    InputError,
    OutOfMemoryError,
    UnsupportedError,
    WeightsError,
)

logger = logging.getLogger("cardan.engine")

# Refusals after which the engine is as it was; any other error is its end.
_REFUSALS = (UnsupportedError, InputError, OutOfMemoryError, WeightsError, ConfigError)
_HOW_TO_WAKE = "wake it up with wake_up(), over HTTP POST /wake_up"


class Sleepable(Protocol):
    """The engine, as far as sleep is concerned."""

    @property
    def has_work(self) -> bool: ...

    def sleep_levels(self) -> tuple[int, ...]: ...

    def abort_all(self) -> None: ...

    def sleep(self, level: int) -> None: ...

    def wake(self, tags: tuple[str, ...]) -> tuple[str, ...]: ...


class Sleeper:
    """Takes an engine to sleep once it has nothing to do, and wakes it.

    Commands are taken between steps and in their order; a sleep begins in ``advance``, once there
    is no work. The engine's thread calls both. ``answer`` is told what became of each.
    """

    def __init__(
        self,
        engine: Sleepable,
        reset_prefix_cache: Callable[[], None],
        answer: Callable[[Answered], None],
    ) -> None:
        self._engine = engine
        self._reset_prefix_cache = reset_prefix_cache
        self._answer = answer
        self._level = 0
        self._falling: list[Sleep] = []
        # Read by the thread that watches for progress: moving weights is no hang.
        self.is_moving = False
        self.moved_at = time.monotonic()

    @property
    def refusal(self) -> str | None:
        """Why no request is taken now; None: it is."""
        if self._level:
            return f"the engine sleeps (level {self._level}); {_HOW_TO_WAKE}"
        if self._falling:
            return f"the engine is about to sleep; afterwards {_HOW_TO_WAKE}"
        return None

    def take(self, command: Sleep | Wake) -> None:
        """Wake, or begin to fall asleep, or refuse it.

        Raises:
            Exception: the engine cannot be used any more.
        """
        if isinstance(command, Wake):
            self._move(lambda: self._wake(command), [command.ticket])
            return
        try:
            self._check(command)
        except CardanError as error:
            self._refuse(command.ticket, error)
            return
        if self._level:
            self._say(command.ticket)  # it sleeps as it should
            return
        self._falling.append(command)
        if command.mode == "abort":
            self._engine.abort_all()

    def advance(self) -> None:
        """Sleep, if that was asked for and there is no work left.

        Raises:
            Exception: the engine cannot be used any more.
        """
        if self._falling and not self._engine.has_work:
            falling, self._falling = self._falling, []
            level = falling[0].level
            self._move(lambda: self._sleep(level), [command.ticket for command in falling])

    def _check(self, command: Sleep) -> None:
        levels = self._engine.sleep_levels()
        if not levels:
            raise UnsupportedError("the device of this engine cannot sleep")
        if command.level not in levels:
            known = ", ".join(map(str, levels))
            raise InputError(f"level is {command.level}; it must be one of {known}", "level")
        current = self._falling[0].level if self._falling else self._level
        if current not in (0, command.level):
            raise InputError(
                f"level is {command.level}, but the engine sleeps at level {current}, or is about "
                f"to; {_HOW_TO_WAKE} first",
                "level",
            )

    def _move(self, act: Callable[[], None], tickets: list[int]) -> None:
        self.is_moving = True
        try:
            act()
        except _REFUSALS as error:
            for ticket in tickets:
                self._refuse(ticket, error)
        else:
            for ticket in tickets:
                self._say(ticket)
        finally:
            self.moved_at = time.monotonic()
            self.is_moving = False

    def _sleep(self, level: int) -> None:
        self._engine.sleep(level)
        self._level = level
        self._reset_prefix_cache()
        logger.info("the engine sleeps (level %d)", level)

    def _wake(self, command: Wake) -> None:
        falling, self._falling = self._falling, []
        for sleep in falling:
            self._refuse(sleep.ticket, UnsupportedError("it was woken up before it slept"))
        if self._level and not self._engine.wake(tuple(command.tags)):
            self._level = 0
            logger.info("the engine is awake")

    def _say(self, ticket: int) -> None:
        self._answer(Answered(ticket, self._level))

    def _refuse(self, ticket: int, error: Exception) -> None:
        kind: RefusalKind = "failed"
        if isinstance(error, UnsupportedError):
            kind = "unsupported"
        elif isinstance(error, InputError):
            kind = "invalid"
        logger.warning("sleep or wake refused: %s", error)
        self._answer(Answered(ticket, self._level, str(error), kind))
