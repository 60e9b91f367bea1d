"""Messages between a client and its engine."""

from dataclasses import dataclass

from cardan.core.types.engine_info import EngineInfo
from cardan.core.types.outputs import StepOutputs
from cardan.core.types.request import EngineRequest


@dataclass(frozen=True, slots=True)
class Submit:
    request: EngineRequest


@dataclass(frozen=True, slots=True)
class Abort:
    keys: list[int]


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """Forget all cached prefixes."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """End what is left with an error and stop."""


Command = Submit | Abort | ResetPrefixCache | Shutdown


@dataclass(frozen=True, slots=True)
class Ready:
    info: EngineInfo


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine could not start, or has died; ``message`` is the cause and the remedy."""

    message: str
    is_config: bool = False


@dataclass(frozen=True, slots=True)
class Outputs:
    outputs: StepOutputs


@dataclass(frozen=True, slots=True)
class Beat:
    """The engine's process lives; ``step_age`` is how long its loop has shown no progress."""

    step_age: float


Event = Ready | Failed | Outputs | Beat
