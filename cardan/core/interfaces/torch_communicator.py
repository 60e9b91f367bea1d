"""Reference collectives over ``torch.distributed``."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Self

import torch
import torch.distributed as dist

from cardan.core.interfaces.communication import Communicator, GroupSpec, ReduceOp

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
_TIMEOUT = timedelta(seconds=60)


class TorchCommunicator(Communicator):
    """One group of ``torch.distributed``; the default backend is gloo.

    The first group of a process initialises ``torch.distributed`` and its ``close`` ends it.
    """

    def __init__(self, group: dist.ProcessGroup, owns_process: bool) -> None:
        self._group = group
        self._owns_process = owns_process
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)

    @classmethod
    def join(cls, spec: GroupSpec, backend: str = "gloo") -> Self:
        """Meet the other ranks at ``spec.rendezvous``, a ``tcp://`` or ``file://`` address."""
        dist.init_process_group(
            backend,
            init_method=spec.rendezvous,
            rank=spec.rank,
            world_size=spec.world_size,
            timeout=_TIMEOUT,
        )
        world = dist.group.WORLD
        if world is None:
            raise RuntimeError("torch.distributed has no default group after initialisation")
        return cls(world, owns_process=True)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        dist.all_reduce(tensor, _OPS[op], group=self._group)
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(parts, tensor.contiguous(), group=self._group)
        return torch.cat(parts, dim)

    def reduce_scatter(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        # gloo has no reduce_scatter: the sum is made whole and cut.
        total = self.all_reduce(tensor.clone())
        return total.chunk(self.world_size, dim)[self.rank].contiguous()

    def all_to_all(
        self, tensor: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> torch.Tensor:
        out = tensor.new_empty(sum(receive_counts), *tensor.shape[1:])
        dist.all_to_all_single(
            out, tensor, list(receive_counts), list(send_counts), group=self._group
        )
        return out

    def broadcast(self, tensor: torch.Tensor, root: int) -> torch.Tensor:
        dist.broadcast(tensor, self._global(root), group=self._group)
        return tensor

    def send(self, tensor: torch.Tensor, peer: int) -> None:
        dist.send(tensor, self._global(peer), group=self._group)

    def recv(self, out: torch.Tensor, peer: int) -> None:
        dist.recv(out, self._global(peer), group=self._group)

    def split(self, ranks: Sequence[int]) -> "TorchCommunicator | None":
        members = [self._global(rank) for rank in ranks]
        group = dist.new_group(members, timeout=_TIMEOUT)
        if self.rank not in ranks or not isinstance(group, dist.ProcessGroup):
            return None
        return TorchCommunicator(group, owns_process=False)

    def close(self) -> None:
        if self._owns_process and dist.is_initialized():
            dist.destroy_process_group()

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self._group, rank)
