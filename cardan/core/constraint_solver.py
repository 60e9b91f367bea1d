"""Turns everybody's constraints into one configuration, and says who decided what."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from difflib import get_close_matches
from math import lcm
from typing import Any, get_args

from cardan.core.config.engine import EngineConfig
from cardan.core.config.fallbacks import FALLBACKS
from cardan.core.interfaces.constraints import Constraint, ConstraintOp, Severity
from cardan.core.interfaces.errors import ConfigError, PluginError

# How each operator reads in a message.
_WORDS: dict[str, str] = {"==": "", "in": "one of ", "multiple_of": "a multiple of "}

# Owners of settings that no constraint has set.
USER = "user"
DEFAULT = "default"

# Operators that name values, rather than bounds of them.
_LISTS = ("==", "in")


@dataclass(frozen=True, slots=True)
class Decision:
    """A setting: its value, whose it is, why."""

    path: str
    value: Any
    owner: str
    reason: str = ""

    def __str__(self) -> str:
        why = f": {self.reason}" if self.reason else ""
        return f"{self.path} = {self.value} ({self.owner}{why})"


@dataclass(frozen=True, slots=True)
class Resolved:
    """The configuration, and how it came about.

    Attributes:
        config: with a value for each setting that the engine has one for.
        decisions: what constraints have set.
        unmet: preferences that were not followed.
        settings: each setting that the engine has a value of its own for, with whose value it got
            (``USER``, ``DEFAULT``, or the owners of constraints).
    """

    config: EngineConfig
    decisions: tuple[Decision, ...] = ()
    unmet: tuple[Constraint, ...] = ()
    settings: tuple[Decision, ...] = ()

    def __str__(self) -> str:
        lines = [str(decision) for decision in self.decisions]
        lines += [f"not followed: {_say(constraint)}" for constraint in self.unmet]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class _Choice:
    value: Any


def say_settings(settings: Sequence[Decision]) -> str:
    """Every setting, and whose value it is, in one line."""
    return ", ".join(f"{item.path} {item.value} ({item.owner})" for item in settings)


def owned_constraints(constraints: object, owner: str) -> tuple[Constraint, ...]:
    """Constraints as ``owner`` returned them, with the owner filled in.

    Raises:
        PluginError: they are not a sequence of well-formed constraints.
    """
    if isinstance(constraints, str) or not isinstance(constraints, Iterable):
        raise PluginError(f"{owner} gave {constraints!r} instead of a sequence of constraints")
    checked = []
    for item in constraints:
        if not isinstance(item, Constraint):
            raise PluginError(f"{owner} gave {item!r} among its constraints")
        checked.append(replace(item, owner=owner))
    return tuple(checked)


def solve(
    config: EngineConfig,
    constraints: Sequence[Constraint],
    explicit: Collection[str] = (),
) -> Resolved:
    """The configuration that meets every ``require`` and as many ``prefer`` as possible.

    A setting that is None or ``auto`` is open: requirements and preferences choose its value, and
    where they leave it open the engine's own is taken (``FALLBACKS``). A setting at another default
    is moved by requirements only. Any other value, and the settings whose paths are in
    ``explicit``, are the user's: a requirement that contradicts one is an error. Preferences count
    in the order given. Where only bounds are known, the allowed value nearest to the engine's own
    is taken; where it has none, the largest allowed, or without an upper bound the smallest.

    Raises:
        ConfigError: requirements contradict the user or each other; all owners are named.
        PluginError: a constraint is malformed, its path is unknown, or it prefers a value for what
            is never open; its owner is named.
    """
    by_path: dict[str, list[Constraint]] = {}
    known = _known_settings(config)
    for constraint in constraints:
        _check_wellformed(constraint, known)
        by_path.setdefault(constraint.path, []).append(constraint)
    for path in FALLBACKS:
        by_path.setdefault(path, [])
    start = config
    decisions: dict[str, Decision] = {}
    unmet: list[Constraint] = []
    for path, wishes in by_path.items():
        value = config.get(path)
        is_users = not _is_open(value) and (path in explicit or value != known[path])
        choice, left_out = _solve_setting(path, value, wishes, is_users)
        unmet += left_out
        if choice is not None and choice.value != value:
            config = config.with_value(path, choice.value)
            decision = _decision(path, choice.value, wishes, left_out)
            if decision is not None:
                decisions[path] = decision
    settings = tuple(
        decisions.get(path)
        or Decision(path, config.get(path), DEFAULT if _is_open(start.get(path)) else USER)
        for path in FALLBACKS
    )
    return Resolved(config.check(), tuple(decisions.values()), tuple(unmet), settings)


def _solve_setting(
    path: str, value: Any, wishes: Sequence[Constraint], is_users: bool
) -> tuple[_Choice | None, list[Constraint]]:
    """The value to set (None: leave it as it is), and the preferences not followed."""
    required = [wish for wish in wishes if wish.severity == "require"]
    preferred = [wish for wish in wishes if wish.severity == "prefer"]
    if not _is_open(value):
        left_out = [wish for wish in preferred if not _allows(wish, value)]
        broken = [wish for wish in required if not _allows(wish, value)]
        if not broken:
            return None, left_out
        if is_users:
            raise ConfigError(_contradiction(path, value, broken))
        choice = _choose(required, value)
        if choice is None:
            raise ConfigError(_conflict(path, required))
        return choice, [wish for wish in preferred if not _allows(wish, choice.value)]
    return _solve_open(path, required, preferred)


def _solve_open(
    path: str, required: Sequence[Constraint], preferred: Sequence[Constraint]
) -> tuple[_Choice | None, list[Constraint]]:
    """As ``_solve_setting`` for a setting that the user left open."""
    own = FALLBACKS.get(path)
    choice = _close(required, own)
    if choice is None and not _is_only_forbidden(required):
        raise ConfigError(_conflict(path, required))
    followed = list(required)
    left_out = []
    for wish in preferred:
        narrower = _close([*followed, wish], own)
        if narrower is None:
            left_out.append(wish)
        else:
            followed.append(wish)
            choice = narrower
    if choice is None:
        raise ConfigError(_conflict(path, required))
    return (None if choice.value is None else choice), left_out


def _close(wishes: Sequence[Constraint], own: Any) -> _Choice | None:
    """A value for an open setting, of which the engine's is ``own``; None: there is none.

    Where values are only forbidden and the engine has none of its own, the setting stays open
    (None): whoever closes it knows the rest.
    """
    if own is None and _is_only_forbidden(wishes):
        return _Choice(None)
    is_listed = any(wish.op in _LISTS for wish in wishes)
    if own is not None and not is_listed and all(_allows(wish, own) for wish in wishes):
        return _Choice(own)
    return _choose(wishes, own)


def _choose(wishes: Sequence[Constraint], current: Any) -> _Choice | None:
    """A value that all wishes allow, near ``current`` unless that is None; None: there is none."""
    listed: list[Any] | None = None
    for wish in wishes:
        if wish.op == "==":
            listed = [wish.value]
            break
        if wish.op == "in" and listed is None:
            listed = list(wish.value)
    if listed is None and isinstance(current, bool):
        listed = [not current]
    if listed is None:
        return _choose_number(wishes, current)
    for value in listed:
        if all(_allows(wish, value) for wish in wishes):
            return _Choice(value)
    return None


def _choose_number(wishes: Sequence[Constraint], current: Any) -> _Choice | None:
    """As ``_choose`` where only bounds, factors and forbidden values are given."""
    bounds = [wish for wish in wishes if wish.op != "forbid"]
    if not bounds or isinstance(current, str):
        return None
    lows = [wish.value for wish in bounds if wish.op == ">="]
    highs = [wish.value for wish in bounds if wish.op == "<="]
    factors = [wish.value for wish in bounds if wish.op == "multiple_of"]
    step = lcm(*factors) if factors else 1
    low = max(lows) if lows else (step if factors else None)
    high = min(highs) if highs else None
    start = high if current is None else (current if high is None else min(current, high))
    # From the start downwards in steps, then from the low end upwards; each forbidden value can
    # cost one step, so one more than there are of them is enough.
    tries = len(wishes) - len(bounds) + 1
    candidates: list[Any] = []
    if start is not None:
        aligned = start - start % step if factors else start
        candidates += [aligned - step * turn for turn in range(tries)]
    if low is not None:
        aligned = -(-low // step) * step if factors else low
        candidates += [aligned + step * turn for turn in range(tries)]
    for value in candidates:
        is_in_range = (low is None or value >= low) and (high is None or value <= high)
        if is_in_range and all(_allows(wish, value) for wish in wishes):
            return _Choice(value)
    return None


def _allows(wish: Constraint, value: Any) -> bool:
    try:
        return wish.allows(value)
    except TypeError as error:
        raise PluginError(f"{_say(wish)}: cannot be compared with {value!r} ({error})") from error


def _is_open(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value == "auto")


def _is_only_forbidden(wishes: Sequence[Constraint]) -> bool:
    return all(wish.op == "forbid" for wish in wishes)


def _known_settings(config: EngineConfig) -> dict[str, Any]:
    """Path -> default value; ``MISSING`` where a setting has none."""
    return {
        f"{section.name}.{setting.name}": _default(setting)
        for section in fields(config)
        if is_dataclass(getattr(config, section.name))
        for setting in fields(getattr(config, section.name))
    }


def _default(setting: "Field[Any]") -> Any:
    if setting.default_factory is not MISSING:
        return setting.default_factory()
    return setting.default


def _check_wellformed(constraint: Constraint, known: Mapping[str, Any]) -> None:
    owner = constraint.owner or "an unnamed owner"
    if constraint.path not in known:
        near = get_close_matches(constraint.path, known, 1)
        hint = f", did you mean {near[0]}?" if near else ""
        raise PluginError(f"{owner} constrains {constraint.path}, which is no setting{hint}")
    if constraint.op not in get_args(ConstraintOp):
        raise PluginError(f"{owner} constrains {constraint.path} by unknown op {constraint.op!r}")
    if constraint.severity not in get_args(Severity):
        raise PluginError(
            f"{owner} constrains {constraint.path} with unknown severity {constraint.severity!r}"
        )
    default = known[constraint.path]
    if constraint.severity == "prefer" and not _is_open(default):
        what = "has no default" if default is MISSING else f"is {default!r} where nobody sets it"
        raise PluginError(
            f"{owner} prefers a value of {constraint.path}, but that is never left open (it "
            f"{what}); it can only be required"
        )
    if constraint.op == "multiple_of" and (
        not isinstance(constraint.value, int) or constraint.value < 1
    ):
        raise PluginError(
            f"{owner} wants {constraint.path} to be a multiple of {constraint.value!r}, "
            "which is not a positive integer"
        )
    if constraint.op == "in" and (
        isinstance(constraint.value, str) or not isinstance(constraint.value, Collection)
    ):
        raise PluginError(
            f"{owner} wants {constraint.path} to be in {constraint.value!r}, which is not a "
            "collection of values"
        )
    if constraint.op in ("<=", ">=") and not isinstance(constraint.value, int | float):
        raise PluginError(
            f"{owner} bounds {constraint.path} by {constraint.value!r}, which is not a number"
        )


def _say(wish: Constraint) -> str:
    demand = wish.op if wish.op in ("<=", ">=") else ""
    if wish.op == "forbid":
        return f"{wish.owner or 'an unnamed owner'} forbids {wish.path} {wish.value}" + _why(wish)
    value = ", ".join(map(str, wish.value)) if wish.op == "in" else wish.value
    words = f"{demand} " if demand else _WORDS[wish.op]
    verb = "requires" if wish.severity == "require" else "prefers"
    return f"{wish.owner or 'an unnamed owner'} {verb} {wish.path} {words}{value}" + _why(wish)


def _why(wish: Constraint) -> str:
    return f" ({wish.reason})" if wish.reason else ""


def _contradiction(path: str, value: Any, broken: Sequence[Constraint]) -> str:
    demands = "; ".join(_say(wish) for wish in broken)
    return (
        f"{path} is set to {value}, but {demands}; change {path} or leave it open to have it chosen"
    )


def _conflict(path: str, required: Sequence[Constraint]) -> str:
    demands = "; ".join(_say(wish) for wish in required)
    return (
        f"no value of {path} meets all demands: {demands}; "
        "block one of the plugins, or choose another platform or backend"
    )


def _decision(
    path: str, value: Any, wishes: Sequence[Constraint], left_out: Sequence[Constraint]
) -> Decision | None:
    """Owners and reasons of all that had a say in the value; None: it is the engine's own."""
    heard = [wish for wish in wishes if all(wish is not other for other in left_out)]
    if value == FALLBACKS.get(path) and not any(wish.op in _LISTS for wish in heard):
        return None
    owners = dict.fromkeys(wish.owner or "an unnamed owner" for wish in heard)
    reasons = dict.fromkeys(wish.reason for wish in heard if wish.reason)
    return Decision(path, value, ", ".join(owners), "; ".join(reasons))
