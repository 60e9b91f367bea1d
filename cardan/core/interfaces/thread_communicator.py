"""Collectives between threads of one process: for tests, and exact in their order of summation."""

import threading
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor

from cardan.core.interfaces.communication import Communicator, ReduceOp
from cardan.core.interfaces.errors import CardanError, ConfigError


class _Meeting:
    """What the ranks of one group share."""

    def __init__(self, world_size: int, timeout: float) -> None:
        self.world_size = world_size
        self.timeout = timeout
        self.offers: list[Any] = [None] * world_size
        self._barrier = threading.Barrier(world_size)
        self._mail: dict[tuple[int, int], SimpleQueue[Tensor]] = {
            (source, target): SimpleQueue()
            for source in range(world_size)
            for target in range(world_size)
        }

    def wait(self) -> None:
        try:
            self._barrier.wait(self.timeout)
        except threading.BrokenBarrierError:
            raise CardanError(
                f"not all {self.world_size} ranks came to a collective within {self.timeout} s"
            ) from None

    def post(self, source: int, target: int, tensor: Tensor) -> None:
        self._mail[source, target].put(tensor)

    def fetch(self, source: int, target: int) -> Tensor:
        try:
            return self._mail[source, target].get(timeout=self.timeout)
        except Empty:
            raise CardanError(
                f"rank {source} sent nothing to rank {target} within {self.timeout} s"
            ) from None


class ThreadCommunicator(Communicator):
    """One rank of a group of threads. Sums run in rank order, so every rank has the same bits."""

    features = frozenset({"deterministic"})

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        """Use ``group``, which makes the ranks of one meeting."""
        self.rank = rank
        self.world_size = meeting.world_size
        self._meeting = meeting
        self._closed = False

    @classmethod
    def group(cls, world_size: int, timeout: float = 60.0) -> "list[ThreadCommunicator]":
        """All ranks of a new group, one for each thread. A rank that waits longer than
        ``timeout`` seconds for the others fails."""
        if world_size < 1:
            raise ConfigError(f"a group needs at least one rank, got {world_size}")
        meeting = _Meeting(world_size, timeout)
        return [cls(rank, meeting) for rank in range(world_size)]

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        parts = self._exchange(tensor)
        result = parts[0].clone()
        for part in parts[1:]:
            result = result + part if op == "sum" else torch.maximum(result, part)
        return self._done(result)

    def all_gather(self, tensor: Tensor, dim: int = 0) -> Tensor:
        return self._done(torch.cat(self._exchange(tensor), dim=dim))

    def reduce_scatter(self, tensor: Tensor, dim: int = 0) -> Tensor:
        if tensor.shape[dim] % self.world_size:
            raise ConfigError(
                f"reduce_scatter splits dimension {dim} of size {tensor.shape[dim]} into "
                f"{self.world_size} equal shares, which it is no multiple of"
            )
        return self.all_reduce(tensor).chunk(self.world_size, dim=dim)[self.rank].contiguous()

    def all_to_all(
        self, tensor: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> Tensor:
        rows = tensor[: sum(send_counts)].split(list(send_counts))
        received = [parts[self.rank] for parts in self._exchange(rows)]
        result = torch.cat(received)
        counts = [part.shape[0] for part in received]
        self._meeting.wait()
        if counts != list(receive_counts):
            raise ConfigError(
                f"rank {self.rank} expected {list(receive_counts)} rows and was sent {counts}"
            )
        return result

    def broadcast(self, tensor: Tensor, root: int) -> Tensor:
        return self._done(self._exchange(tensor)[root].clone())

    def send(self, tensor: Tensor, peer: int) -> None:
        self._open().post(self.rank, peer, tensor.clone())

    def recv(self, out: Tensor, peer: int) -> None:
        out.copy_(self._open().fetch(peer, self.rank))

    def split(self, ranks: Sequence[int]) -> "ThreadCommunicator | None":
        chosen = tuple(ranks)
        meeting = self._open()
        offered = self._exchange((chosen, _Meeting(len(chosen), meeting.timeout)))
        # Ranks may split into different parts at once: the first of a part provides the meeting.
        result = None
        if self.rank in chosen:
            result = ThreadCommunicator(chosen.index(self.rank), offered[chosen[0]][1])
        agree = all(offered[rank][0] == chosen for rank in chosen)
        meeting.wait()
        if result is not None and not agree:
            raise ConfigError(f"the ranks {list(chosen)} did not all ask for the same split")
        return result

    def close(self) -> None:
        self._closed = True

    def _open(self) -> _Meeting:
        if self._closed:
            raise ConfigError("this communicator is closed")
        return self._meeting

    def _exchange(self, offer: Any) -> list[Any]:
        """Everyone's offers. They may not be changed before the second wait, in ``_done``."""
        meeting = self._open()
        meeting.offers[self.rank] = offer
        meeting.wait()
        return list(meeting.offers)

    def _done(self, result: Tensor) -> Tensor:
        self._meeting.wait()
        return result
