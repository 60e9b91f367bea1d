"""What level L6 measured, for people."""

from collections.abc import Mapping, Sequence
from typing import Any

from cardan.testing.conformance.results import SPEED_FACT

_HEADER = ("what", "median", "spread", "floor", "floor/median", "limited by")


def speed_rows(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The facts of each measurement, in the order of the tests."""
    return [row for test in document["tests"] for row in test["facts"].get(SPEED_FACT, ())]


def speed_lines(document: Mapping[str, Any]) -> list[str]:
    """A table of all measurements and where their floors are from; empty without any."""
    rows = speed_rows(document)
    if not rows:
        return []
    cells = [_HEADER, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(_HEADER))]
    table = [_aligned(line, widths) for line in cells]
    sources = dict.fromkeys(str(row["floor_source"]) for row in rows)
    return [*table, *(f"floors: {source}" for source in sources)]


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    floor = row["floor_s"]
    return (
        str(row["what"]),
        _time(row["median_s"]),
        f"±{row['spread']:.0%}",
        "unknown" if floor is None else _time(floor),
        "" if row["ratio"] is None else f"{row['ratio']:.1%}",
        str(row["limit"]),
    )


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = zip(cells, widths, strict=True)
    return "  ".join([first[0].ljust(first[1]), *(text.rjust(width) for text, width in others)])


def _time(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"
