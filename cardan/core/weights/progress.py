"""Telling of a load that takes long."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

_LOG = logging.getLogger("cardan.engine")

_QUIET_SECONDS = 2.0
_STEP_PERCENT = 20


class LoadProgress:
    """Logs how far a load is, from two seconds on and then every 20 percent.

    ``clock`` returns seconds; the load begins now.
    """

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._clock = clock
        self._began = clock()
        self._next_percent = 0

    def __call__(self, done: int, total: int) -> None:
        """``done`` of ``total`` tensors are loaded."""
        percent = 100 * done // total
        if percent < self._next_percent or done == total:
            return
        if self._clock() - self._began < _QUIET_SECONDS:
            return
        _LOG.info("loading %s: %d %% of %d tensors", self._what, percent, total)
        self._next_percent = percent + _STEP_PERCENT
