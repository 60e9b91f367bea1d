"""Counters and histograms that show under two prefixes at once, and the families they become.

Everything is written and read on the event loop's thread, so nothing is locked.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

# The field's dashboards and gateways read the first; the second is our own.
PREFIXES = ("vllm:", "cardan:")

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


@dataclass(slots=True)
class Counter:
    """A count that only rises. ``label``: name of its one label beside the common ones."""

    name: str
    help: str
    label: str | None = None
    _values: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, amount: float = 1, value: str = "") -> None:
        self._values[value] += amount

    def raise_to(self, total: float) -> None:
        """Take a total counted elsewhere; one that fell (a restart) is not followed down."""
        self._values[""] = max(self._values[""], total)

    def collect(self, common: Mapping[str, str]) -> Iterator[Family]:
        labels = [*common, *([self.label] if self.label else [])]
        if self.label is None:
            self.add(0)
        for prefix in PREFIXES:
            family = CounterMetricFamily(prefix + self.name, self.help, labels=labels)
            for value, count in self._values.items():
                extra = [value] if self.label else []
                family.add_metric([*common.values(), *extra], count)
            yield family


class Histogram:
    """A distribution over fixed upper bounds; one call may add several equal observations."""

    def __init__(self, name: str, help_text: str, bounds: Sequence[float]) -> None:
        self.name = name
        self._help = help_text
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def collect(self, common: Mapping[str, str]) -> Iterator[Family]:
        buckets = []
        total = 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), total))
        for prefix in PREFIXES:
            family = HistogramMetricFamily(prefix + self.name, self._help, labels=[*common])
            family.add_metric([*common.values()], buckets, self._sum)
            yield family


def gauges(
    name: str, help_text: str, value: float, common: Mapping[str, str]
) -> Iterator[GaugeMetricFamily]:
    """One value as a gauge under both prefixes."""
    for prefix in PREFIXES:
        family = GaugeMetricFamily(prefix + name, help_text, labels=[*common])
        family.add_metric([*common.values()], value)
        yield family
