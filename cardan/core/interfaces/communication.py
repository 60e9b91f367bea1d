"""Collectives between ranks."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

ReduceOp = Literal["sum", "max"]


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """A set of ranks that talk: ``rank`` of ``world_size``, meeting at ``rendezvous``."""

    rank: int
    world_size: int
    rendezvous: str


class Communicator(ABC):
    """Collectives over one group. Each rank calls the same methods in the same order.

    Tensors are contiguous and on the communicator's device. Operations are ordered on the
    device's current stream; ``features`` tells more (``graph_safe``, ``quantized``, ...).
    """

    rank: int
    world_size: int
    features: frozenset[str] = frozenset()

    @abstractmethod
    def all_reduce(self, tensor: "torch.Tensor", op: ReduceOp = "sum") -> "torch.Tensor":
        """Reduce over all ranks; may work in place, use the result."""

    @abstractmethod
    def all_gather(self, tensor: "torch.Tensor", dim: int = 0) -> "torch.Tensor":
        """Concatenate every rank's tensor (of equal shape) along ``dim`` in rank order."""

    @abstractmethod
    def reduce_scatter(self, tensor: "torch.Tensor", dim: int = 0) -> "torch.Tensor":
        """Sum over ranks and keep this rank's equal share along ``dim``."""

    @abstractmethod
    def all_to_all(
        self, tensor: "torch.Tensor", send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> "torch.Tensor":
        """Send ``send_counts[r]`` leading rows to rank r; receive ``receive_counts[r]`` from it."""

    @abstractmethod
    def broadcast(self, tensor: "torch.Tensor", root: int) -> "torch.Tensor":
        """Give every rank the root's tensor; may work in place, use the result."""

    @abstractmethod
    def send(self, tensor: "torch.Tensor", peer: int) -> None: ...

    @abstractmethod
    def recv(self, out: "torch.Tensor", peer: int) -> None: ...

    @abstractmethod
    def split(self, ranks: Sequence[int]) -> "Communicator | None":
        """A communicator over ``ranks``; None on ranks outside. Every rank must call it."""

    @abstractmethod
    def close(self) -> None: ...
