"""Reference collectives between threads of one process, for tests and small set-ups."""

import queue
import threading
from collections.abc import Sequence
from typing import TypeVar

import torch

from cardan.core.interfaces.communication import Communicator, ReduceOp

_TIMEOUT_SECONDS = 60.0

T = TypeVar("T")


class _Board:
    """What the ranks of one group share: a barrier, a place each, and mail boxes."""

    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size, timeout=_TIMEOUT_SECONDS)
        self.places: list[object] = [None] * world_size
        self.mail: dict[tuple[int, int], queue.SimpleQueue[torch.Tensor]] = {
            (source, target): queue.SimpleQueue()
            for source in range(world_size)
            for target in range(world_size)
        }


class ThreadCommunicator(Communicator):
    """One rank of a group whose ranks are threads. Sums run in rank order: always the same bits."""

    features = frozenset({"deterministic"})

    def __init__(self, rank: int, world_size: int, board: _Board) -> None:
        self.rank = rank
        self.world_size = world_size
        self._board = board

    @classmethod
    def group(cls, world_size: int) -> list["ThreadCommunicator"]:
        """The communicators of all ranks, one for each thread."""
        board = _Board(world_size)
        return [cls(rank, world_size, board) for rank in range(world_size)]

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        stacked = torch.stack(self._exchange(tensor))
        return stacked.sum(0) if op == "sum" else stacked.amax(0)

    def all_gather(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return torch.cat(self._exchange(tensor), dim)

    def reduce_scatter(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return self.all_reduce(tensor).chunk(self.world_size, dim)[self.rank].contiguous()

    def all_to_all(
        self, tensor: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> torch.Tensor:
        parts = torch.split(tensor, list(send_counts))
        received = [theirs[self.rank] for theirs in self._exchange(parts)]
        sizes = [len(part) for part in received]
        if sizes != list(receive_counts):
            raise ValueError(f"rank {self.rank} expected {list(receive_counts)} rows, got {sizes}")
        return torch.cat(received)

    def broadcast(self, tensor: torch.Tensor, root: int) -> torch.Tensor:
        return self._exchange(tensor)[root].clone()

    def send(self, tensor: torch.Tensor, peer: int) -> None:
        self._board.mail[self.rank, peer].put(tensor.clone())

    def recv(self, out: torch.Tensor, peer: int) -> None:
        out.copy_(self._board.mail[peer, self.rank].get(timeout=_TIMEOUT_SECONDS))

    def split(self, ranks: Sequence[int]) -> "ThreadCommunicator | None":
        members = list(ranks)
        boards = self._exchange(_Board(len(members)))
        if self.rank not in members:
            return None
        # Everybody takes the board that the new group's first rank brought.
        return ThreadCommunicator(members.index(self.rank), len(members), boards[members[0]])

    def close(self) -> None:
        self._board.places[self.rank] = None

    def _exchange(self, value: T) -> list[T]:
        """Every rank's value, in rank order."""
        board = self._board
        board.places[self.rank] = value
        board.barrier.wait()
        values = list(board.places)
        # Nobody may write the next value before all have read this one.
        board.barrier.wait()
        return values  # type: ignore[return-value]  # every place was filled by its rank
