"""Sequences in order: those that wait and those that run."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from cardan.core.scheduler.sequence import Sequence


def _order(sequence: Sequence) -> tuple[Any, ...]:
    return sequence.order


class WaitingQueue:
    """Waiting sequences by order. A preempted one keeps its order, so it goes first again."""

    def __init__(self) -> None:
        self._items: list[Sequence] = []
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._items)

    def __getitem__(self, index: int) -> Sequence:
        return self._items[index]

    def push(self, sequence: Sequence) -> None:
        insort(self._items, sequence, key=_order)
        self.num_tokens += len(sequence.token_ids)

    def pop(self, index: int) -> Sequence:
        sequence = self._items.pop(index)
        self.num_tokens -= len(sequence.token_ids)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        index = bisect_left(self._items, sequence.order, key=_order)
        if index == len(self._items) or self._items[index] is not sequence:
            raise RuntimeError(f"sequence {sequence.key} is not waiting")
        self.pop(index)


class RunningSet:
    """Running sequences by order, and the same as an array of rows, rebuilt only on changes."""

    def __init__(self) -> None:
        self._items: list[Sequence] = []
        self._rows: npt.NDArray[np.intp] | None = None

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._items)

    @property
    def last(self) -> Sequence:
        """The one that goes last, and is preempted first."""
        return self._items[-1]

    @property
    def rows(self) -> npt.NDArray[np.intp]:
        if self._rows is None:
            self._rows = np.array([sequence.row for sequence in self._items], np.intp)
        return self._rows

    def add(self, sequence: Sequence) -> None:
        insort(self._items, sequence, key=_order)
        self._rows = None

    def remove(self, sequence: Sequence) -> None:
        index = bisect_left(self._items, sequence.order, key=_order)
        if self._items[index] is not sequence:
            raise RuntimeError(f"sequence {sequence.key} is not running")
        del self._items[index]
        self._rows = None
