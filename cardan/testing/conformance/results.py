"""What became of each test of the kit, gathered from pytest's reports."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn

import pytest

LEVELS: dict[str, str] = {
    "L0": "hygiene",
    "L1": "device and memory",
    "L2": "operations",
    "L3": "attention",
    "L4": "collectives",
    "L5": "engine",
    "L6": "speed floors",
}
# What a run is made of unless it is told otherwise: L6 takes a quiet machine, and judges nothing.
DEFAULT_LEVELS = tuple(level for level in LEVELS if level != "L6")

Outcome = Literal["passed", "failed", "not supported"]

# Keys of the user properties by which a report says where its test belongs.
LEVEL_PROPERTY = "cardan_level"
TITLE_PROPERTY = "cardan_title"
ID_PROPERTY = "cardan_id"

# Under this name a test of L6 records what it measured: a list of ``speed.SpeedRow.facts``.
SPEED_FACT = "speed"

_LONGEST_REASON = 300
_NOISE = ("AssertionError: ", "Failed: ", "Skipped: ")


def not_supported(reason: str) -> NoReturn:
    """End the running test as "not supported": a skip whose ``reason`` the report shows.

    For what the platform does not declare, or refuses with a reason; never for a wrong result.
    """
    pytest.skip(reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class KitResult:
    """Outcome of one test; ``seconds`` count its fixtures, ``facts`` are what it recorded."""

    level: str
    id: str
    title: str
    outcome: Outcome
    reason: str = ""
    seconds: float = 0.0
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LevelCount:
    """How the tests of one level ended."""

    level: str
    passed: int
    failed: int
    not_supported: int

    @property
    def total(self) -> int:
        return self.passed + self.failed + self.not_supported


class KitResults:
    """Results in the order in which their tests began, one for each test."""

    def __init__(self) -> None:
        self._by_id: dict[str, KitResult] = {}

    def add(self, result: KitResult) -> None:
        """Merge one phase (setup, call, teardown) of a test into what is known of it."""
        known = self._by_id.get(result.id)
        if known is None:
            self._by_id[result.id] = result
            return
        worse = result if _RANK[result.outcome] > _RANK[known.outcome] else known
        self._by_id[result.id] = replace(
            worse,
            seconds=known.seconds + result.seconds,
            facts={**known.facts, **result.facts},
        )

    def all(self) -> tuple[KitResult, ...]:
        return tuple(self._by_id.values())


_RANK: dict[Outcome, int] = {"passed": 0, "not supported": 1, "failed": 2}


def result_of(report: pytest.TestReport) -> KitResult | None:
    """The result that one phase of a test brings; None for a test that is not the kit's."""
    properties = dict(report.user_properties)
    if LEVEL_PROPERTY not in properties:
        return None
    outcome: Outcome = "passed"
    reason = ""
    if report.failed:
        outcome, reason = "failed", failure_reason(report)
        if report.when != "call":
            reason = f"{report.when}: {reason}"
    elif report.skipped:
        outcome, reason = "not supported", _skip_reason(report)
    return KitResult(
        level=str(properties.pop(LEVEL_PROPERTY)),
        id=str(properties.pop(ID_PROPERTY)),
        title=str(properties.pop(TITLE_PROPERTY)),
        outcome=outcome,
        reason=reason,
        seconds=report.duration,
        facts=properties,
    )


def failure_reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """A failure in one line: what was raised or asserted, without its traceback."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        return _one_line(crash.message)
    lines = [line for line in str(report.longrepr).splitlines() if line.strip()]
    return _one_line(lines[-1].removeprefix("E ") if lines else "")


def count_levels(results: Iterable[KitResult]) -> tuple[LevelCount, ...]:
    """Counts of each level that had a test, in order."""
    outcomes: dict[str, list[Outcome]] = {}
    for result in results:
        outcomes.setdefault(result.level, []).append(result.outcome)
    return tuple(
        LevelCount(
            level, found.count("passed"), found.count("failed"), found.count("not supported")
        )
        for level, found in sorted(outcomes.items())
    )


def level_reached(counts: Sequence[LevelCount]) -> str | None:
    """The highest Ln such that L0 to Ln were all run and none of their tests failed.

    L6 measures: it is reached where something was measured, too.
    """
    by_level = {count.level: count for count in counts}
    reached = None
    for level in LEVELS:
        count = by_level.get(level)
        if count is None or count.failed or (level == "L6" and not count.passed):
            break
        reached = level
    return reached


def _skip_reason(report: pytest.TestReport) -> str:
    # (path, line, message) of the skip.
    if isinstance(report.longrepr, tuple):
        return _one_line(report.longrepr[2])
    return _one_line(str(report.longrepr))


def _one_line(text: str) -> str:
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    for prefix in _NOISE:
        first = first.removeprefix(prefix)
    return first if len(first) <= _LONGEST_REASON else first[: _LONGEST_REASON - 1] + "…"
