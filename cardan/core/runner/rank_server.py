"""A further rank's side of ``RankedExecutor``: does what it is told until told to stop."""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from cardan.core.interfaces.errors import CardanError, ConfigError
from cardan.core.interfaces.executor import ModelExecutor, TokenMask
from cardan.core.runner.rank_channel import RankChannel
from cardan.core.runner.rank_messages import (
    COMMANDS,
    Answer,
    AskMemory,
    BindKV,
    Command,
    Done,
    Failed,
    Forward,
    Load,
    Memory,
    Opened,
    RankOrder,
    Sample,
    Sleep,
    Stop,
    Wake,
    Warmup,
    encode,
)
from cardan.core.types.step import SchedulerOutput

logger = logging.getLogger("cardan.engine")


@dataclass(frozen=True, slots=True)
class RankParts:
    """A rank's executor, and how it loads its model."""

    executor: ModelExecutor
    load: Callable[[], object]


def receive_order(channel: RankChannel) -> RankOrder:
    """The first word.

    Raises:
        EOFError: rank 0 is gone.
    """
    body = channel.receive()
    order = None if body is None else COMMANDS.decode(body)
    if not isinstance(order, RankOrder):
        raise EOFError("rank 0 is gone")
    return order


def serve_rank(
    channel: RankChannel,
    open_device: Callable[[], None],
    build: Callable[[], RankParts],
    close: Callable[[], None],
) -> int:
    """Be a rank until rank 0 says stop or is gone; an exit code.

    ``open_device`` comes first, ``build`` then waits for the other ranks; ``close`` frees the
    device and leaves the group, whatever became of the rest.
    """
    threading.Thread(target=_end_with_parent, args=(channel,), daemon=True).start()
    try:
        open_device()
        channel.send(encode(Opened()))
        _Server(channel, build()).run()
    except Exception as error:
        at = time.monotonic()
        is_ours = isinstance(error, CardanError)
        text = str(error) if is_ours else f"{type(error).__name__}: {error}"
        logger.debug("this rank failed", exc_info=True)
        with contextlib.suppress(OSError):
            channel.send(encode(Failed(text, at, is_config=isinstance(error, ConfigError))))
        return 1
    finally:
        close()
    return 0


def _end_with_parent(channel: RankChannel) -> None:
    """A step, a device or a collective that hangs must not keep this process alive."""
    if channel.is_gone(None):
        os._exit(1)


class _Server:
    def __init__(self, channel: RankChannel, parts: RankParts) -> None:
        self._channel = channel
        self._parts = parts
        self._step: SchedulerOutput | None = None

    def run(self) -> None:
        while (body := self._channel.receive()) is not None:
            command = COMMANDS.decode(body)
            if isinstance(command, Stop):
                break
            answer = self._obey(command)
            if answer is not None:
                self._channel.send(encode(answer))
        self._parts.executor.close()

    def _obey(self, command: Command) -> Answer | None:
        executor = self._parts.executor
        match command:
            case Forward(step):
                self._step = step
                executor.forward(step)
            case Sample(rows, bits):
                mask = None if bits is None else TokenMask(rows, bits)
                if self._step is None:
                    raise RuntimeError("a step is sampled that was not run")
                # The device has the tokens; nobody asks for them here.
                executor.sample(self._step, mask)
            case Load():
                self._parts.load()
                return Done()
            case AskMemory(utilization):
                return Memory(executor.available_kv_bytes(utilization))
            case BindKV(config):
                executor.bind_kv(config)
                return Done()
            case Warmup():
                executor.warmup()
                return Done()
            case Sleep() | Wake():
                self._move(command)
                return Done()
        return None

    def _move(self, command: Sleep | Wake) -> None:
        executor = self._parts.executor
        if isinstance(command, Sleep):
            # What was told is done: nobody waits for the results of a step here.
            self._step = None
            executor.sleep(command.level)
        else:
            executor.wake(command.tags)
