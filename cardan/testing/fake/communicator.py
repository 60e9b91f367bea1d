"""Collectives as queued work."""

from collections.abc import Callable, Sequence, Set

import torch
from torch import Tensor

from cardan.core.interfaces.communication import Communicator, ReduceOp
from cardan.core.interfaces.errors import ConfigError
from cardan.testing.fake.op_rules import TensorSpec
from cardan.testing.fake.recorder import Sink


class QueuedCommunicator(Communicator):
    """Runs another communicator's collectives in the order of the device's current stream."""

    def __init__(
        self, inner: Communicator, sink: Callable[[], Sink], faults: Set[str] = frozenset()
    ) -> None:
        """``sink`` gives the place where work goes now. Takes over ``inner``."""
        self.rank = inner.rank
        self.world_size = inner.world_size
        self.features = inner.features
        self._inner = inner
        self._sink = sink
        self._faults = faults
        self._num_reduced = 0

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        return self._queue(tensor.shape, tensor, lambda: self._reduced(tensor, op))

    def all_gather(self, tensor: Tensor, dim: int = 0) -> Tensor:
        shape = list(tensor.shape)
        shape[dim] *= self.world_size
        return self._queue(shape, tensor, lambda: self._inner.all_gather(tensor, dim))

    def reduce_scatter(self, tensor: Tensor, dim: int = 0) -> Tensor:
        shape = list(tensor.shape)
        if shape[dim] % self.world_size:
            raise ConfigError(
                f"reduce_scatter splits dimension {dim} of size {shape[dim]} into "
                f"{self.world_size} equal shares, which it is no multiple of"
            )
        shape[dim] //= self.world_size
        return self._queue(shape, tensor, lambda: self._own_share(self._reduced(tensor), dim))

    def all_to_all(
        self, tensor: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> Tensor:
        shape = (sum(receive_counts), *tensor.shape[1:])
        return self._queue(
            shape, tensor, lambda: self._inner.all_to_all(tensor, send_counts, receive_counts)
        )

    def broadcast(self, tensor: Tensor, root: int) -> Tensor:
        return self._queue(tensor.shape, tensor, lambda: self._inner.broadcast(tensor, root))

    def send(self, tensor: Tensor, peer: int) -> None:
        self._sink().put(lambda: self._inner.send(tensor, peer))

    def recv(self, out: Tensor, peer: int) -> None:
        self._sink().put(lambda: self._inner.recv(out, peer))

    def split(self, ranks: Sequence[int]) -> "QueuedCommunicator | None":
        part = self._inner.split(ranks)
        return None if part is None else QueuedCommunicator(part, self._sink, self._faults)

    def close(self) -> None:
        self._inner.close()

    def _queue(self, shape: Sequence[int], like: Tensor, compute: Callable[[], Tensor]) -> Tensor:
        sink = self._sink()
        plain = torch.empty(tuple(shape), dtype=like.dtype, device="meta")
        result = sink.allocate(TensorSpec.of(plain))
        sink.put(lambda: result.copy_(compute()))
        return result

    def _own_share(self, reduced: Tensor, dim: int) -> Tensor:
        return reduced.chunk(self.world_size, dim=dim)[self.rank]

    def _reduced(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        # The inner one may work in place; the input is the caller's.
        own = tensor.clone()
        is_last = self.world_size > 1 and self.rank == self.world_size - 1
        if "lost_rank" in self._faults and op == "sum" and is_last:
            own.zero_()
        result = self._inner.all_reduce(own, op)
        self._num_reduced += 1
        if "unstable_reduce" in self._faults and op == "sum" and result.is_floating_point():
            # Every other sum is rounded as another order of its terms would be.
            result = result * (1 + self._num_reduced % 2 * torch.finfo(result.dtype).eps)
        return result
