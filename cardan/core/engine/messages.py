"""Messages between a client and its engine."""

from dataclasses import dataclass, field
from typing import Literal

from cardan.core.types.engine_info import EngineInfo, PluginReport
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


# What becomes of running requests before an engine sleeps: it waits for them, or aborts them.
SleepMode = Literal["wait", "abort"]
RefusalKind = Literal["unsupported", "invalid", "failed"]


@dataclass(frozen=True, slots=True)
class Sleep:
    """Fall asleep; ``ticket`` marks the answer. ``level`` as in ``ModelExecutor.sleep``."""

    ticket: int
    level: int
    mode: SleepMode


@dataclass(frozen=True, slots=True)
class Wake:
    """Take the memory of ``tags`` (as in ``ModelExecutor.wake``) again."""

    ticket: int
    tags: list[str]


Command = Submit | Abort | ResetPrefixCache | Shutdown | Sleep | Wake


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
    plugins: PluginReport = field(default_factory=PluginReport)


@dataclass(frozen=True, slots=True)
class Answered:
    """What became of a ``Sleep`` or ``Wake``; ``level`` is what the engine sleeps at, 0: awake."""

    ticket: int
    level: int
    refusal: str | None = None
    kind: RefusalKind | None = None


Event = Ready | Failed | Outputs | Beat | Answered
