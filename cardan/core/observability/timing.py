"""Named phases with their seconds, for what takes time once, such as a start."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Phases:
    """Seconds spent in phases, in the order in which they first began.

    A phase that is entered again adds up. Phases may nest; each counts its own whole time, so
    ``elapsed`` (since construction), not the sum, is the total. Not for several threads.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._start = clock()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of the block under ``name``, also when it raises."""
        self._seconds.setdefault(name, 0.0)
        start = self._clock()
        try:
            yield
        finally:
            self._seconds[name] += self._clock() - start

    def add(self, name: str, seconds: float) -> None:
        """Count time that was measured elsewhere."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    @property
    def seconds(self) -> dict[str, float]:
        return dict(self._seconds)

    @property
    def elapsed(self) -> float:
        """Seconds since construction."""
        return self._clock() - self._start

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self._seconds.items())
        return f"{self.elapsed:.2f} s ({parts})" if parts else f"{self.elapsed:.2f} s"
