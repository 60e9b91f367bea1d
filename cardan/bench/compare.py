"""Whether one set of results is better than another, or only differs by noise.

The figures are medians over repeats. The interval of their ratio is a bootstrap's: both sets are
drawn again with replacement, 95 % of the ratios lie within (Efron's percentile interval). A verdict
is given only if the interval leaves out 1 and each set has at least three repeats. Where the base
can be 0, as a number of failures should be, there is no ratio: then one set must lie wholly above
the other.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from cardan.bench.result import Result
from cardan.bench.table import render_number, render_table
from cardan.core.types.errors import ConfigError

Verdict = Literal["better", "worse", "changed", "within noise", "too few repeats"]

MIN_REPEATS = 3
_RESAMPLES = 10_000
_SEED = 0
# Figures whose name has one of these parts are better when they are smaller, or larger.
_LESS_IS_BETTER = ("_ms", "_s", "_bytes", "failed", "errors")
_MORE_IS_BETTER = ("_per_s", "fraction", "completed")
# Of a distribution over requests, what is compared unless the user names others.
_USUAL_LEAVES = ("median", "p99")
# What describes the load, not how it went.
_NOT_COMPARED = ("prompt_tokens", "output_tokens", "total")


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over repeats."""

    median: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        if self.count == 1:
            return render_number(self.median)
        numbers = map(render_number, (self.median, self.low, self.high))
        return "{} [{}..{}]".format(*numbers)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure of two sets; ``ratio`` is other over base, None where the base is 0."""

    metric: str
    base: Spread
    other: Spread
    ratio: float | None
    interval: tuple[float, float] | None
    verdict: Verdict


def compare(
    base: Sequence[Result],
    other: Sequence[Result],
    *,
    metrics: Sequence[str] = (),
    force: bool = False,
) -> list[Comparison]:
    """Every figure that both sets have, or the named ones, in the base's order.

    Raises:
        ConfigError: the sets are of different kinds, or (without ``force``) of different
            configurations, models or devices; a named figure is in neither.
    """
    for result in (*base, *other):
        if result.kind != base[0].kind:
            raise ConfigError(
                f"a {base[0].kind} and a {result.kind} result cannot be compared; "
                "give results of one kind"
            )
        found = differences(base[0], result)
        if found and not force:
            raise ConfigError(
                f"the results are not of the same configuration: {'; '.join(found)}; "
                "to compare them all the same give --force"
            )
    before, after = _samples(base), _samples(other)
    return [
        _compare_metric(name, before[name], after[name]) for name in _chosen(before, after, metrics)
    ]


def differences(one: Result, two: Result) -> list[str]:
    """What two results do not share of configuration, model, device and processor; one line each.

    Dates, commits, labels and versions may differ: they are what is compared.
    """
    return _differ(_identity(one), _identity(two))


def render_comparison(comparisons: Sequence[Comparison], labels: tuple[str, str]) -> str:
    """A table with a line for each figure."""
    rows = []
    for item in comparisons:
        interval = "-" if item.interval is None else "{:.3f}..{:.3f}".format(*item.interval)
        ratio = "-" if item.ratio is None else f"{item.ratio:.3f}"
        rows.append((item.metric, str(item.base), str(item.other), ratio, interval, item.verdict))
    return render_table(("", *labels, "ratio", "95 % of it", "verdict"), rows)


def bootstrap_ratio(base: Sequence[float], other: Sequence[float]) -> tuple[float, float] | None:
    """95 % interval of median(other) / median(base); None where a median can be 0."""
    generator = np.random.default_rng(_SEED)
    below = _resampled_medians(base, generator)
    above = _resampled_medians(other, generator)
    if (below <= 0).any():
        return None
    low, high = np.percentile(above / below, [2.5, 97.5])
    return float(low), float(high)


def _resampled_medians(
    values: Sequence[float], generator: np.random.Generator
) -> npt.NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    picks = generator.integers(0, len(array), (_RESAMPLES, len(array)))
    return np.asarray(np.median(array[picks], axis=1))


def _identity(result: Result) -> dict[str, Any]:
    return {
        "model": result.model,
        "config": result.config,
        "device": result.device,
        "host": {name: result.host.get(name) for name in ("processor", "cpus")},
    }


def _differ(one: Mapping[str, Any], two: Mapping[str, Any], prefix: str = "") -> list[str]:
    found = []
    for name in dict.fromkeys((*one, *two)):
        left, right = one.get(name), two.get(name)
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            found += _differ(left, right, f"{prefix}{name}.")
        elif left != right:
            found.append(f"{prefix}{name} is {left!r} and {right!r}")
    return found


def _samples(results: Sequence[Result]) -> dict[str, list[float]]:
    """Values of each figure that all samples have."""
    samples = [sample for result in results for sample in result.samples]
    if not samples:
        raise ConfigError("a result has no samples; it was stopped before its first repeat")
    names = [name for name in samples[0] if all(name in sample for sample in samples)]
    return {name: [sample[name] for sample in samples] for name in names}


def _chosen(
    before: Mapping[str, Any], after: Mapping[str, Any], wanted: Sequence[str]
) -> list[str]:
    common = [name for name in before if name in after]
    for name in wanted:
        if name not in common:
            near = get_close_matches(name, common, 1)
            hint = f", did you mean {near[0]}?" if near else f"; there are {', '.join(common)}"
            raise ConfigError(f"metric: the results have no figure {name}{hint}")
    if wanted:
        return list(wanted)
    return [name for name in common if _is_usual(name)]


def _is_usual(name: str) -> bool:
    *parents, leaf = name.split(".")
    if leaf in _NOT_COMPARED or "limits" in parents:
        return False
    return not parents or not parents[-1].endswith("_ms") or leaf in _USUAL_LEAVES


def _compare_metric(name: str, base: Sequence[float], other: Sequence[float]) -> Comparison:
    before, after = _spread(base), _spread(other)
    interval = bootstrap_ratio(base, other)
    return Comparison(
        metric=name,
        base=before,
        other=after,
        ratio=after.median / before.median if before.median else None,
        interval=interval if min(len(base), len(other)) >= MIN_REPEATS else None,
        verdict=_verdict(name, base, other, interval),
    )


def _verdict(
    name: str,
    base: Sequence[float],
    other: Sequence[float],
    interval: tuple[float, float] | None,
) -> Verdict:
    if min(len(base), len(other)) < MIN_REPEATS:
        return "too few repeats"
    if interval is None:
        is_less, is_more = max(other) < min(base), min(other) > max(base)
    else:
        is_less, is_more = interval[1] < 1.0, interval[0] > 1.0
    if not (is_less or is_more):
        return "within noise"
    parts = name.split(".")
    if any(part.endswith(_MORE_IS_BETTER) for part in parts):
        return "worse" if is_less else "better"
    if any(part.endswith(_LESS_IS_BETTER) for part in parts):
        return "better" if is_less else "worse"
    return "changed"


def _spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values), len(values))
