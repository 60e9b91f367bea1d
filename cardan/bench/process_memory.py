"""Resident memory of a process and all that it started, where the system has ``/proc``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_FIELD = re.compile(r"^(VmRSS|VmHWM):\s+(\d+) kB$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes, summed over processes; pages that they share are counted in each.

    ``peak_rss`` adds up the processes' own peaks, which need not have been at the same time.
    """

    rss: int
    peak_rss: int
    processes: int


def tree_memory(pid: int) -> MemoryUse | None:
    """Memory of a process and its descendants; None where it cannot be read."""
    uses = [use for item in _descendants(pid) if (use := _status(item)) is not None]
    if not uses:
        return None
    return MemoryUse(
        rss=sum(use["VmRSS"] for use in uses),
        peak_rss=sum(use["VmHWM"] for use in uses),
        processes=len(uses),
    )


def _descendants(pid: int) -> list[int]:
    found = [pid]
    for parent in found:  # grows while it is walked
        for children in _PROC.glob(f"{parent}/task/*/children"):
            try:
                found += map(int, children.read_text().split())
            except OSError:  # ended in between
                continue
    return found


def _status(pid: int) -> dict[str, int] | None:
    """Bytes by field name; None for a process that is gone or has no memory of its own."""
    try:
        text = (_PROC / str(pid) / "status").read_text()
    except OSError:
        return None
    fields = {name: int(count) * 1024 for name, count in _FIELD.findall(text)}
    return fields if len(fields) == 2 else None
