"""Rows of a run: JSON lines, whatever a measurement raises, within a limit of time."""

import json
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

# A measurement gives a row's fields; one with ``failures`` that are not empty has failed.
Measure = Callable[[], Mapping[str, Any]]


def emit(**row):
    print(json.dumps(row), flush=True)


class Rows:
    """Runs measurements in turn and prints a line for each, also for those that fail or that there
    is no time for. ``limit_s`` counts from now; None: there is none."""

    def __init__(self, limit_s: float | None = None) -> None:
        self._end = None if limit_s is None else time.monotonic() + limit_s
        self.num_failed = 0
        self.num_not_run = 0

    def left_s(self) -> float | None:
        """Seconds until no further row begins; None: no limit."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def run(self, name: str, measure: Measure, *, is_conclusion: bool = False) -> bool:
        """Whether the row was measured and nothing was wrong. A conclusion from rows before it is
        drawn at any time."""
        if self.left_s() == 0.0 and not is_conclusion:
            return self.not_run(name, "the time is over")
        try:
            fields = dict(measure())
        except Exception as error:
            fields = {"error": _in_words(error), "at": _place(error)}
        emit(row=name, **fields)
        is_right = not (fields.get("failures") or "error" in fields)
        self.num_failed += not is_right
        return is_right

    def not_run(self, name: str, why: str) -> bool:
        emit(row=name, not_run=why)
        self.num_not_run += 1
        return False

    @property
    def exit_code(self) -> int:
        """1: a row failed; 3: none did, but some were not run."""
        if self.num_failed:
            return 1
        return 3 if self.num_not_run else 0


def process_error(code: int, text: str) -> RuntimeError:
    """Of a process that ended badly, with the end of what it printed."""
    return RuntimeError(f"exit code {code}: {' '.join(text.split())[-500:]}")


def _in_words(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:600]


def _place(error: Exception) -> str:
    """Where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
