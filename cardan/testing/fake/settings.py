"""What the fake device poses as, and which faults it has."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from cardan.core.interfaces.capabilities import GraphSupport
from cardan.core.interfaces.errors import ConfigError

VARIABLE = "CARDAN_FAKE"

Tier = Literal["kernel", "executor"]
StepModel = Literal["digest", "llama"]

# Happen at one step, numbered from 0 in the order of launch: ``KIND@STEP``.
StepFault = Literal["slow", "stuck", "raise", "oom", "die"]
# Hold all the time.
StandingFault = Literal[
    "wrong_op",  # an operation's result is off
    "unstable_sum",  # a sum whose bits differ from run to run
    "wrong_mask",  # a query sees one key too many
    "window_off_by_one",  # a sliding window keeps one key too many
    "stale_block",  # a block table of the step before is used
    "lost_write",  # the last token of a step is not written to the cache
    "lost_copy",  # block copies do not happen
    "lost_sync",  # an event says "done" when the work is not
    "leak",  # pools outlive the device
    "stale_graph",  # a captured graph computes at its first replay only
    "unstable_reduce",  # a collective whose bits differ from run to run
    "lost_rank",  # a collective forgets the last rank
    "lost_edit",  # an executor misses that rows got further blocks (of that tier alone)
    "env_write",  # probing writes to the environment
    "device_at_probe",  # probing starts the device's thread
]
STEP_FAULTS: tuple[str, ...] = get_args(StepFault)
STANDING_FAULTS: tuple[str, ...] = get_args(StandingFault)


@dataclass(frozen=True, slots=True)
class FaultAt:
    """A step fault and the step it happens at."""

    kind: StepFault
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeSettings:
    """Settings of the fake platform; in the environment ``CARDAN_FAKE="step_ms=5 depth=1"``.

    Attributes:
        tier: ``kernel``: a torch device under the core's runner; ``executor``: whole steps, with
            a KV cache that only the executor can see.
        model: what the executor tier computes. ``digest``: tokens from a hash of all tokens
            before, read back from the paged memory, which makes any wrong block visible;
            ``llama``: a plain NumPy forward pass.
        depth: steps in flight (``Capabilities.async_depth``).
        step_ms: least time that a step occupies the device, milliseconds.
        slow_ms: what a ``slow`` step takes, milliseconds.
        static: whether shapes are bucketed and strict, as for a compiled program.
        graphs: what can be captured.
        num_devices: devices found.
        memory_mb: memory of each device, MiB.
        float64: whether the device knows float64; where not, work on such tensors is refused.
        peak: whether the device tells what steps need of it (``MemoryAllocator.peak_of``).
        faults: standing faults.
        step_faults: faults at steps.
        marker: path of a file; a step fault happens only while there is none, and makes it.
    """

    tier: Tier = "kernel"
    model: StepModel = "llama"
    depth: int = 1
    step_ms: float = 0.0
    slow_ms: float = 1000.0
    static: bool = False
    graphs: GraphSupport = "none"
    num_devices: int = 1
    memory_mb: int = 256
    float64: bool = True
    peak: bool = False
    faults: frozenset[StandingFault] = frozenset()
    step_faults: tuple[FaultAt, ...] = ()
    marker: str = ""

    @classmethod
    def parse(cls, text: str) -> "FakeSettings":
        """Read ``name=value`` words; ``fault=KIND`` and ``fault=KIND@STEP`` may come repeatedly.

        Raises:
            ConfigError: a name or value is unknown.
        """
        values: dict[str, Any] = {}
        faults: set[StandingFault] = set()
        step_faults: list[FaultAt] = []
        known = {item.name: item for item in fields(cls)}
        for word in text.split():
            name, _, value = word.partition("=")
            if name == "fault":
                _add_fault(value, faults, step_faults)
            elif name in known and name not in ("faults", "step_faults"):
                values[name] = _convert(name, value, type(known[name].default))
            elif word != "1":  # CARDAN_FAKE=1: all defaults
                names = ", ".join(sorted(set(known) - {"faults", "step_faults"} | {"fault"}))
                raise ConfigError(f"{VARIABLE}: {word!r} is no setting; there are: {names}")
        return cls(faults=frozenset(faults), step_faults=tuple(step_faults), **values)

    @classmethod
    def from_env(cls, environment: Mapping[str, str]) -> "FakeSettings | None":
        """The settings in ``environment``, or None: the fake device is not asked for."""
        text = environment.get(VARIABLE)
        return None if text is None else cls.parse(text)


_CHOICES: dict[str, tuple[str, ...]] = {
    "tier": get_args(Tier),
    "model": get_args(StepModel),
    "graphs": get_args(GraphSupport),
}


def _add_fault(value: str, faults: set[StandingFault], step_faults: list[FaultAt]) -> None:
    kind, at, step = value.partition("@")
    for name in STANDING_FAULTS:
        if kind == name and not at:
            faults.add(name)  # type: ignore[arg-type]
            return
    if kind in STEP_FAULTS and step.isdecimal():
        step_faults.append(FaultAt(kind, int(step)))  # type: ignore[arg-type]
        return
    raise ConfigError(
        f"{VARIABLE}: fault={value} is none of {', '.join(STANDING_FAULTS)}, "
        f"or {', '.join(STEP_FAULTS)} with @STEP"
    )


def _convert(name: str, value: str, kind: type) -> Any:
    choices = _CHOICES.get(name)
    if choices is not None and value not in choices:
        raise ConfigError(f"{VARIABLE}: {name} must be one of {', '.join(choices)}, got {value!r}")
    if kind is bool:
        if value not in ("0", "1"):
            raise ConfigError(f"{VARIABLE}: {name} must be 0 or 1, got {value!r}")
        return value == "1"
    try:
        number = kind(value)
    except ValueError:
        raise ConfigError(f"{VARIABLE}: {name} must be a number, got {value!r}") from None
    if kind is not str and number < 0:
        raise ConfigError(f"{VARIABLE}: {name} must be at least 0, got {value}")
    return number
