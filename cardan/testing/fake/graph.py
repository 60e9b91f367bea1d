"""Captured work of the fake device: a list of operations on fixed tensors."""

from bisect import bisect_left, insort
from collections.abc import Callable

import torch
from torch import Tensor

from cardan.core.interfaces.errors import UnsupportedError
from cardan.core.interfaces.graphs import Graph
from cardan.testing.fake.op_rules import TensorSpec

Task = Callable[[], object]


class Arena:
    """Memory that graphs of one pool share: each capture starts with all of it free again.

    So the results of one graph last until another graph of the pool is replayed.
    """

    def __init__(self, allocate: Callable[[int], Tensor]) -> None:
        """``allocate`` gives a uint8 tensor of so many bytes, or raises OutOfMemoryError."""
        self._allocate = allocate
        self._blocks: list[Tensor] = []
        self._free: list[tuple[int, int]] = []
        self.num_bytes = 0

    def start(self) -> None:
        """Begin a capture."""
        self._free = sorted((block.nbytes, place) for place, block in enumerate(self._blocks))

    def take(self, spec: TensorSpec) -> Tensor:
        """The smallest free block that is large enough, or a new one."""
        if spec.num_bytes == 0:
            return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype)
        index = bisect_left(self._free, (spec.num_bytes, 0))
        if index == len(self._free):
            block = self._allocate(spec.num_bytes)
            insort(self._free, (block.nbytes, len(self._blocks)))
            self._blocks.append(block)
            self.num_bytes += block.nbytes
        _, place = self._free.pop(index)
        flat = self._blocks[place][: spec.num_bytes].view(spec.dtype)
        return flat.as_strided(spec.shape, spec.stride)


class Tape:
    """The sink of a capture."""

    def __init__(self, arena: Arena) -> None:
        self.tasks: list[Task] = []
        self.allocate = arena.take

    def put(self, task: Task) -> None:
        self.tasks.append(task)

    def wait_for(self, what: str) -> None:
        raise UnsupportedError(f"{what} waits for the device, so it cannot be captured")


class FakeGraph(Graph):
    """Replays its tasks as one launch."""

    def __init__(
        self,
        tasks: list[Task],
        arena: Arena,
        num_bytes: int,
        launch: Callable[[Task], None],
        is_stale: bool = False,
    ) -> None:
        """``num_bytes``: what this capture added to ``arena``. A stale one replays once."""
        self._tasks = tasks
        self._is_stale = is_stale
        self._arena: Arena | None = arena
        self._num_bytes = num_bytes
        self._launch = launch

    @property
    def arena(self) -> Arena:
        """The memory of this graph and its pool.

        Raises:
            UnsupportedError: the graph was released.
        """
        if self._arena is None:
            raise UnsupportedError("this graph was released")
        return self._arena

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def replay(self) -> None:
        if self._arena is None:
            raise UnsupportedError("this graph was released")
        # The list is held by the launch, so that a release cannot cut it short.
        tasks = self._tasks
        self._launch(lambda: _run(tasks))
        if self._is_stale:
            self._tasks = []

    def release(self) -> None:
        self._tasks, self._arena, self._num_bytes = [], None, 0


def _run(tasks: list[Task]) -> None:
    for task in tasks:
        task()
