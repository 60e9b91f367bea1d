"""What travels between the ranks of one executor: commands to a rank, and its answers.

Plain data as msgpack; arrays are their dtype, shape and bytes.
"""

from typing import Any

import msgspec
import numpy as np

from cardan.core.config.engine import EngineConfig
from cardan.core.interfaces.capabilities import DeviceInfo
from cardan.core.types.kv import KVCacheConfig
from cardan.core.types.step import Int32, SchedulerOutput


class RankOrder(msgspec.Struct, frozen=True, tag=True):
    """A process's first word: which rank it is, on what, and where the ranks meet.

    ``config`` is solved; ``platform`` is the name of the one that has ``device``.
    """

    rank: int
    num_ranks: int
    rendezvous: str
    platform: str
    device: DeviceInfo
    config: EngineConfig


class Load(msgspec.Struct, frozen=True, tag=True):
    """Build the model and load this rank's part of the weights."""


class AskMemory(msgspec.Struct, frozen=True, tag=True):
    """Say how many bytes KV pools may take."""

    utilization: float


class BindKV(msgspec.Struct, frozen=True, tag=True):
    config: KVCacheConfig


class Warmup(msgspec.Struct, frozen=True, tag=True):
    """Capture or touch what steps will use."""


class Sleep(msgspec.Struct, frozen=True, tag=True):
    """Give the device's memory back."""

    level: int


class Wake(msgspec.Struct, frozen=True, tag=True):
    """Take memory again, of what is named."""

    tags: list[str]


class Forward(msgspec.Struct, frozen=True, tag=True):
    """Run the first half of a step; nothing is answered."""

    step: SchedulerOutput


class Sample(msgspec.Struct, frozen=True, tag=True):
    """Run the second half of the step; nothing is answered. The mask is none without ``rows``."""

    rows: list[int] = []
    bits: Int32 | None = None


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Free everything and end."""


class Opened(msgspec.Struct, frozen=True, tag=True):
    """The rank's device is open; it waits for the others."""


class Memory(msgspec.Struct, frozen=True, tag=True):
    num_bytes: int


class Done(msgspec.Struct, frozen=True, tag=True):
    """What was asked is done."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The rank ends. ``at``: when it failed, by the host's monotonic clock, since the first of
    several is the cause of the others. ``is_config``: the message has cause and remedy."""

    message: str
    at: float
    is_config: bool = False


Command = RankOrder | Load | AskMemory | BindKV | Warmup | Sleep | Wake | Forward | Sample | Stop
Answer = Opened | Memory | Done | Failed


def _plain(value: object) -> tuple[str, tuple[int, ...], bytes]:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    raise TypeError(f"{type(value).__name__} cannot be sent to another rank")


def _array(_kind: type[Any], value: Any) -> Any:
    dtype, shape, data = value
    # Writable, as the sender's is.
    return np.frombuffer(bytearray(data), np.dtype(dtype)).reshape(shape)


COMMANDS: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command, dec_hook=_array)
ANSWERS: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer, dec_hook=_array)
_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)


def encode(message: Command | Answer) -> bytes:
    return _ENCODER.encode(message)
