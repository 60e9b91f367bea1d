"""When the requests of a load are due, drawn from a seed.

A pattern is a process of rate 1 (gaps of mean 1), carried through the inverse of the expected
number of arrivals up to a time. So every pattern can be run at a constant rate or up a ramp.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from cardan.core.types.errors import ConfigError

Pattern = Literal["poisson", "constant", "burst"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """How requests arrive.

    Attributes:
        rate: requests a second; infinite: all at once, at 0.
        pattern: ``poisson`` (gaps of the gamma distribution, see ``burstiness``), ``constant``
            (equal gaps), or ``burst`` (``burst_size`` at once, then a gap that keeps the rate).
        burstiness: shape of the gamma distribution; 1 is a Poisson process, less is burstier,
            more is steadier. The squared coefficient of variation of the gaps is 1/burstiness.
        burst_size: requests of one burst.
        ramp_to: rate at the end of the ramp, which begins at ``rate``; None: no ramp.
        ramp_seconds: length of the linear ramp; afterwards the rate stays.
    """

    rate: float = math.inf
    pattern: Pattern = "poisson"
    burstiness: float = 1.0
    burst_size: int = 1
    ramp_to: float | None = None
    ramp_seconds: float = 60.0

    def check(self) -> None:
        """Raise ConfigError, naming the setting, for what no load can follow."""
        _check_positive("request_rate", self.rate, "requests a second; inf sends all at once")
        _check_positive("burstiness", self.burstiness, "1 is a Poisson process")
        _check_positive("burst_size", self.burst_size, "requests that are sent at once")
        if self.ramp_to is None:
            return
        _check_positive("ramp_to", self.ramp_to, "requests a second")
        _check_positive("ramp_seconds", self.ramp_seconds, "seconds from request_rate to ramp_to")
        if math.isinf(self.rate) or math.isinf(self.ramp_to):
            raise ConfigError("ramp_to: a ramp goes between two finite rates; set --request-rate")


def _check_positive(name: str, value: float, meaning: str) -> None:
    if not value > 0:
        raise ConfigError(f"{name} is {value}; it must be more than 0 ({meaning})")


def due_times(arrivals: Arrivals, seed: int) -> Iterator[float]:
    """Endless ascending times in seconds, the first at 0; the same for the same seed."""
    arrivals.check()
    if math.isinf(arrivals.rate):
        return itertools.repeat(0.0)
    times = (_time_of(arrivals, count) for count in _unit_process(arrivals, seed))
    return itertools.accumulate(times, max)  # rounding may turn two times of a ramp around


def _unit_process(arrivals: Arrivals, seed: int) -> Iterator[float]:
    """Arrivals of mean gap 1, the first at 0."""
    if arrivals.pattern == "burst":
        size = arrivals.burst_size
        return (float(index - index % size) for index in itertools.count())
    if arrivals.pattern == "constant":
        return (float(index) for index in itertools.count())
    rng = random.Random(f"{seed}:arrivals")
    shape = arrivals.burstiness
    gaps = (rng.gammavariate(shape, 1 / shape) for _ in itertools.count())
    return itertools.accumulate(gaps, initial=0.0)


def _time_of(arrivals: Arrivals, count: float) -> float:
    """The time up to which `count` arrivals are expected."""
    first, last = arrivals.rate, arrivals.ramp_to
    if last is None:
        return count / first
    length = arrivals.ramp_seconds
    in_ramp = (first + last) / 2 * length
    if count >= in_ramp:
        return length + (count - in_ramp) / last
    # count = first t + (last - first) t^2 / (2 length), solved without cancellation.
    slope = (last - first) / length
    return 2 * count / (first + math.sqrt(max(0.0, first * first + 2 * slope * count)))


def read_trace(path: Path) -> list[float]:
    """Recorded arrival times of a file, moved so that the first is 0.

    One time a line: a number of seconds, or a JSON object with ``timestamp`` in seconds. Lines
    need no order; empty lines are skipped.

    Raises:
        ConfigError: the file cannot be read or a line is no time; names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"trace {path}: {error}") from error
    times = sorted(
        _trace_time(path, number, line) for number, line in enumerate(lines, 1) if line.strip()
    )
    if not times:
        raise ConfigError(f"trace {path}: holds no times; write one a line, in seconds")
    return [time - times[0] for time in times]


def _trace_time(path: Path, number: int, line: str) -> float:
    try:
        value = msgspec.json.decode(line)
    except msgspec.DecodeError:
        value = None
    if isinstance(value, dict):
        value = value.get("timestamp")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(
            f'trace {path}, line {number}: no time; write seconds, or {{"timestamp": seconds}}'
        )
    return float(value)
