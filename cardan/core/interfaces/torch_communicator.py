"""Collectives over ``torch.distributed``, without its process-wide default group."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from cardan.core.interfaces.communication import Communicator, GroupSpec, ReduceOp
from cardan.core.interfaces.errors import ConfigError

_TIMEOUT = timedelta(minutes=10)
_OPS: dict[ReduceOp, Any] = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}

# Makes a process group of a backend from store, rank, size and timeout. Torch types neither the
# store nor the backends' collectives.
GroupMaker = Callable[[Any, int, int, timedelta], Any]


def gloo_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """A group of torch's host backend."""
    return dist.ProcessGroupGloo(store, rank, size, timeout)


class TorchCommunicator(Communicator):
    """A group of processes that meet at ``tcp://host:port`` or ``file:///path``.

    The default backend works on host memory; tensors of other devices go through it. A platform
    whose collectives take device tensors passes ``make_group`` and ``staged=False``.
    """

    def __init__(
        self,
        group: GroupSpec,
        device: torch.device,
        make_group: GroupMaker = gloo_group,
        staged: bool = True,
        store: Any = None,
    ) -> None:
        """Blocks until all ranks are there. ``store`` stands for a rendezvous that has happened.

        Raises:
            ConfigError: the rendezvous is neither tcp:// nor file://, or the rank is no rank.
        """
        if not 0 <= group.rank < group.world_size:
            raise ConfigError(f"rank {group.rank} is not below the world size {group.world_size}")
        self.rank = group.rank
        self.world_size = group.world_size
        self._spec = group
        self._device = device
        self._make_group = make_group
        self._staging = staged
        self._work_device = torch.device("cpu") if staged else device
        self._store = _store(group) if store is None else store
        # Keys of the group stay apart from those of its parts.
        members = dist.PrefixStore("group", self._store)  # type: ignore[attr-defined]
        self._group = make_group(members, group.rank, group.world_size, _TIMEOUT)
        self._num_splits = 0

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        work = self._staged(tensor)
        options = dist.AllreduceOptions()
        options.reduceOp = _OPS[op]
        self._open().allreduce([work], options).wait()
        return work.to(self._device)

    def all_gather(self, tensor: Tensor, dim: int = 0) -> Tensor:
        work = self._staged(tensor)
        parts = [torch.empty_like(work) for _ in range(self.world_size)]
        self._open().allgather([parts], [work]).wait()
        return torch.cat(parts, dim=dim).to(self._device)

    def reduce_scatter(self, tensor: Tensor, dim: int = 0) -> Tensor:
        if tensor.shape[dim] % self.world_size:
            raise ConfigError(
                f"reduce_scatter splits dimension {dim} of size {tensor.shape[dim]} into "
                f"{self.world_size} equal shares, which it is no multiple of"
            )
        # The host backend has no reduce-scatter for every dtype; the sum of all does as well.
        reduced = self.all_reduce(tensor.clone())
        return reduced.chunk(self.world_size, dim=dim)[self.rank].contiguous()

    def all_to_all(
        self, tensor: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> Tensor:
        work = self._staged(tensor)[: sum(send_counts)]
        out = work.new_empty((sum(receive_counts), *work.shape[1:]))
        self._open().alltoall_base(out, work, list(receive_counts), list(send_counts)).wait()
        return out.to(self._device)

    def broadcast(self, tensor: Tensor, root: int) -> Tensor:
        work = self._staged(tensor)
        options = dist.BroadcastOptions()
        options.rootRank = root
        self._open().broadcast([work], options).wait()
        return work.to(self._device)

    def send(self, tensor: Tensor, peer: int) -> None:
        self._open().send([self._staged(tensor)], peer, 0).wait()

    def recv(self, out: Tensor, peer: int) -> None:
        work = self._staged(out)
        self._open().recv([work], peer, 0).wait()
        if work is not out:
            out.copy_(work)

    def split(self, ranks: Sequence[int]) -> "TorchCommunicator | None":
        self._num_splits += 1
        if self.rank not in ranks:
            return None
        label = f"split{self._num_splits}-{'-'.join(map(str, ranks))}"
        part = replace(self._spec, rank=list(ranks).index(self.rank), world_size=len(ranks))
        store = dist.PrefixStore(label, self._store)  # type: ignore[attr-defined]
        return TorchCommunicator(part, self._device, self._make_group, self._staging, store)

    def close(self) -> None:
        self._group = None

    def _open(self) -> Any:
        if self._group is None:
            raise ConfigError("this communicator is closed")
        return self._group

    def _staged(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._work_device)


def _store(group: GroupSpec) -> Any:
    where = urlsplit(group.rendezvous)
    if where.scheme == "tcp" and where.hostname and where.port:
        return dist.TCPStore(  # type: ignore[attr-defined]
            where.hostname, where.port, group.world_size, group.rank == 0, _TIMEOUT
        )
    if where.scheme == "file" and where.path:
        return dist.FileStore(where.path, group.world_size)  # type: ignore[attr-defined]
    raise ConfigError(
        f"rendezvous {group.rendezvous!r} is neither tcp://host:port nor file:///path"
    )
