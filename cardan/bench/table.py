"""Results as plain text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from cardan.bench.result import Result

_WIDTH = 100


def render_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns under their names: the first flush left, the others flush right."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def render_number(value: float | None) -> str:
    """Four figures or all of the integer part: ``0.01234``, ``12.34``, ``12345``; "-" for None."""
    if value is None:
        return "-"
    if value == int(value) and abs(value) < 1e15:
        return str(int(value))
    if abs(value) >= 1000:
        return f"{value:.0f}"
    return f"{value:.4g}"


def render_figure(name: str, value: float | None) -> str:
    """A number in the unit of its name; bytes as MiB."""
    if value is None or not name.endswith("_bytes"):
        return render_number(value)
    return f"{value / 2**20:.0f} MiB"


def render_result(result: Result) -> str:
    """What was run and its figures, a table for those of one shape."""
    device = " ".join(str(value) for value in result.device.values())
    title = f"{result.kind} {result.model}" + (f" on {device}" if device else "")
    parts = [title, _settings(result.config.get("load", {}))]
    scalars, spreads = _split(result.metrics)
    if scalars:
        parts.append(render_table(("", "value"), [(name, text) for name, text in scalars.items()]))
    # Spreads have different columns where their shapes differ (repeats, requests).
    for header, rows in _by_columns(spreads).items():
        parts.append(
            render_table(
                ("", *header),
                [_spread_cells(name, row) for name, row in rows],
            )
        )
    parts += [f"note: {note}" for note in result.notes]
    if result.interrupted:
        parts.append("interrupted: the figures are of what was done until then")
    return "\n\n".join(part for part in parts if part)


def _spread_cells(name: str, row: Mapping[str, float | None]) -> list[str]:
    cells = (
        render_number(value) if column == "count" else render_figure(name, value)
        for column, value in row.items()
    )
    return [name, *cells]


def _settings(load: Mapping[str, Any]) -> str:
    given = (f"{name}={value}" for name, value in load.items() if value is not None)
    return textwrap.fill("  ".join(given), _WIDTH, break_long_words=False, break_on_hyphens=False)


def _split(
    figures: Mapping[str, Any], prefix: str = ""
) -> tuple[dict[str, str], dict[str, Mapping[str, float | None]]]:
    """Single values as text, and spreads; both by their path, in order."""
    scalars: dict[str, str] = {}
    spreads: dict[str, Mapping[str, float | None]] = {}
    for name, value in figures.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and "median" in value:
            spreads[path] = value
        elif isinstance(value, Mapping):
            inner_scalars, inner_spreads = _split(value, f"{path}.")
            scalars |= inner_scalars
            spreads |= inner_spreads
        elif isinstance(value, int | float) and not isinstance(value, bool):
            scalars[path] = render_figure(name, value)
        elif value is not None:
            scalars[path] = str(value)
    return scalars, spreads


def _by_columns(
    spreads: Mapping[str, Mapping[str, float | None]],
) -> dict[tuple[str, ...], list[tuple[str, Mapping[str, float | None]]]]:
    groups: dict[tuple[str, ...], list[tuple[str, Mapping[str, float | None]]]] = {}
    for name, row in spreads.items():
        # The median is there already.
        shown = {column: value for column, value in row.items() if column != "p50"}
        groups.setdefault(tuple(shown), []).append((name, shown))
    return groups
