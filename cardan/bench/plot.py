"""Pictures of runs whose records were kept: when requests ran, how latencies spread, throughput."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cardan.bench.record import RequestRecord
from cardan.bench.result import Result
from cardan.bench.statistics import inter_token_latencies
from cardan.core.types.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES: tuple[str, ...] = (".png", ".svg", ".pdf")
_WAITING, _PREFILL, _DECODE, _FAILED = "#bbbbbb", "#e69f00", "#0072b2", "#d55e00"
# The throughput curve has a point for so many chunks, so that steady streams look steady.
_CHUNKS_PER_BIN = 8
_MAX_BINS = 100


def kept_records(result: Result) -> list[RequestRecord]:
    """The records of a result.

    Raises:
        ConfigError: they were not kept.
    """
    if not result.records:
        raise ConfigError(
            f"the {result.kind} result {result.label or result.date} has no records to plot; "
            "run the benchmark with --save-records"
        )
    return [RequestRecord(**values) for values in result.records]


def plot_results(results: Sequence[Result], labels: Sequence[str], path: Path) -> None:
    """Draw all results into one file: a timeline for each, and shared axes for the rest.

    Raises:
        ConfigError: matplotlib is missing, records are missing, or the file's name has another
            suffix than ``SUFFIXES``.
    """
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{path}: a plot's file ends in {', '.join(SUFFIXES)}")
    runs = [(label, kept_records(item)) for label, item in zip(labels, results, strict=True)]
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ConfigError(
            "plots need matplotlib, which is missing: pip install 'cardan[bench]'"
        ) from error
    rows = len(runs) + 2
    # A Figure of its own, not pyplot's: no display is looked for, nothing stays behind.
    figure = Figure(figsize=(11, 3 * rows), layout="constrained")
    grid = figure.add_gridspec(rows, 2)
    for row, (label, records) in enumerate(runs):
        draw_timeline(figure.add_subplot(grid[row, :]), records, label)
    ttft, itl = (figure.add_subplot(grid[rows - 2, column]) for column in (0, 1))
    over_time = figure.add_subplot(grid[rows - 1, :])
    for label, records in runs:
        draw_cdf(ttft, [item * 1000 for item in _first_token_waits(records)], label)
        draw_cdf(itl, [item * 1000 for item in _gaps(records)], label)
        draw_throughput(over_time, records, label)
    _name_axes(ttft, "time to first token, from due", "ms", "share of requests")
    _name_axes(itl, "time between chunks", "ms", "share of chunks")
    _name_axes(over_time, "output", "seconds", "tokens / s")
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None


def draw_timeline(axes: Axes, records: Sequence[RequestRecord], label: str) -> None:
    """A line for each request: waiting to be sent, waiting for its first token, streaming."""
    for phase, colour, spans in (
        ("not sent yet", _WAITING, [(item.due, item.sent) for item in records]),
        ("first token awaited", _PREFILL, [(item.sent, _first(item)) for item in records]),
        ("streaming", _DECODE, [(_first(item), item.end) for item in records]),
    ):
        axes.hlines(
            [item.index for item in records],
            [start for start, _ in spans],
            [end for _, end in spans],
            colors=colour,
            label=phase,
            linewidth=max(0.5, min(6.0, 150 / len(records))),
        )
    failed = [item for item in records if item.error is not None]
    if failed:
        axes.plot(
            [item.end for item in failed],
            [item.index for item in failed],
            "x",
            color=_FAILED,
            label="failed",
        )
    axes.locator_params(axis="y", integer=True)
    axes.legend(loc="lower right", fontsize="small")
    _name_axes(axes, f"requests: {label}", "seconds", "request")


def draw_cdf(axes: Axes, values: Sequence[float], label: str) -> None:
    """The share of values that are at most x."""
    if not values:
        return
    ordered = np.sort(np.asarray([min(values), *values]))
    axes.step(ordered, np.arange(len(ordered)) / len(values), where="post", label=label)
    axes.legend(loc="lower right", fontsize="small")


def draw_throughput(axes: Axes, records: Sequence[RequestRecord], label: str) -> None:
    """Tokens a second over time; an answer without chunk times counts at its end."""
    times, tokens = token_arrivals(records)
    end = max(item.end for item in records)
    if not times or end <= 0:
        return
    bins = max(1, min(_MAX_BINS, len(times) // _CHUNKS_PER_BIN))
    counts, edges = np.histogram(times, bins=bins, range=(0.0, end), weights=tokens)
    axes.step(
        edges, np.append(counts, counts[-1]) / (edges[1] - edges[0]), where="post", label=label
    )
    axes.legend(loc="upper right", fontsize="small")


def token_arrivals(records: Sequence[RequestRecord]) -> tuple[list[float], list[int]]:
    """When tokens came, and how many at once."""
    times: list[float] = []
    tokens: list[int] = []
    for item in records:
        times += item.token_times or [item.end]
        tokens += item.chunk_tokens if item.token_times else [item.output_tokens]
    return times, tokens


def _name_axes(axes: Any, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize="medium")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)


def _first(record: RequestRecord) -> float:
    return record.end if record.first_token is None else record.first_token


def _first_token_waits(records: Sequence[RequestRecord]) -> list[float]:
    return [item.first_token - item.due for item in records if item.first_token is not None]


def _gaps(records: Sequence[RequestRecord]) -> list[float]:
    return [gap for item in records for gap in inter_token_latencies(item)]
