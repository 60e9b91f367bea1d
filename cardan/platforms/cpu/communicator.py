"""Collectives between processes of this host over memory that they share (``communicator.c``).

What needs no speed (meeting, sending between two ranks, other dtypes) is the reference's over
``torch.distributed``. Where the memory cannot be shared, all ranks use the reference alone.
"""

import logging
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from cardan.core.interfaces.communication import Communicator, GroupSpec, ReduceOp
from cardan.core.interfaces.torch_communicator import TorchCommunicator
from cardan.platforms.cpu.native.library import NativeLibrary, NativeUnavailable, library
from cardan.platforms.cpu.segment import Segment, create_segment, open_segment

_LOG = logging.getLogger("cardan.engine")

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_OPS: dict[ReduceOp, int] = {"sum": 0, "max": 1}


class SharedMemoryCommunicator(Communicator):
    """Ranks on one host. Sums run in rank order, so every rank has the same bits.

    Sums are float32 and rounded once. A rank that dies or does not come in time ends the group:
    the collectives of all others raise CardanError, which names it.
    """

    features = frozenset({"deterministic", "graph_safe", "shared_memory"})

    def __init__(self, reference: TorchCommunicator, segment: Segment) -> None:
        """Use ``join``. Owns both."""
        self.rank = reference.rank
        self.world_size = reference.world_size
        self._reference = reference
        self._segment = segment

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        kind = _TYPES.get(tensor.dtype)
        if kind is None:
            return self._reference.all_reduce(tensor, op)
        work = tensor.contiguous()
        self._segment.all_reduce(
            work.data_ptr(), work.numel(), kind, _OPS[op], torch.get_num_threads()
        )
        return work

    def all_gather(self, tensor: Tensor, dim: int = 0) -> Tensor:
        work = tensor.contiguous()
        shape = list(work.shape)
        dim = dim % len(shape)
        outer = torch.Size(shape[:dim]).numel()
        inner = work.nbytes // outer if outer else 0
        shape[dim] *= self.world_size
        out = work.new_empty(shape)
        self._segment.all_gather(
            work.data_ptr(), out.data_ptr(), outer, inner, torch.get_num_threads()
        )
        return out

    def reduce_scatter(self, tensor: Tensor, dim: int = 0) -> Tensor:
        kind = _TYPES.get(tensor.dtype)
        if kind is None or tensor.shape[dim] % self.world_size:
            return self._reference.reduce_scatter(tensor, dim)
        shares = tensor.chunk(self.world_size, dim)
        # Shares follow each other as they lie with dim 0.
        work = torch.stack(shares) if dim else tensor.contiguous()
        out = work.new_empty(shares[0].shape)
        self._segment.reduce_scatter(
            work.data_ptr(), out.data_ptr(), out.numel(), kind, torch.get_num_threads()
        )
        return out

    def broadcast(self, tensor: Tensor, root: int) -> Tensor:
        work = tensor.contiguous()
        self._segment.broadcast(work.data_ptr(), work.nbytes, root, torch.get_num_threads())
        return work

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self._segment.barrier()

    def all_to_all(
        self, tensor: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> Tensor:
        return self._reference.all_to_all(tensor, send_counts, receive_counts)

    def send(self, tensor: Tensor, peer: int) -> None:
        self._reference.send(tensor, peer)

    def recv(self, out: Tensor, peer: int) -> None:
        self._reference.recv(out, peer)

    def split(self, ranks: Sequence[int]) -> Communicator | None:
        part = self._reference.split(ranks)
        return None if part is None else share_memory(part)

    def close(self) -> None:
        self._segment.close()
        self._reference.close()


def join(group: GroupSpec) -> Communicator:
    """Meet the other ranks and share memory with them; blocks until all are there.

    Raises:
        ConfigError: as ``TorchCommunicator``.
    """
    return share_memory(TorchCommunicator(group, torch.device("cpu")))


def share_memory(reference: TorchCommunicator) -> Communicator:
    """The fast form of ``reference``, or itself where the ranks find no way to share memory.

    All ranks of it call this; they decide alike.
    """
    if reference.world_size == 1:
        return reference
    segment, reason = _common_segment(reference)
    failed = reference.all_reduce(torch.tensor([0 if segment else 1]), "max").item()
    if segment is not None and not failed:
        return SharedMemoryCommunicator(reference, segment)
    if segment is not None:
        segment.close()
    _LOG.warning("rank %d exchanges through sockets, not shared memory: %s", reference.rank, reason)
    return reference


def _common_segment(reference: TorchCommunicator) -> tuple[Segment | None, str]:
    """This rank's view of what rank 0 made; else None, and why."""
    rank, size = reference.rank, reference.world_size
    native, reason = _native()
    descriptor, nonce = -1, 0
    if rank == 0 and native is not None:
        try:
            descriptor, nonce = create_segment(size)
        except OSError as error:
            reason = str(error)
    told = reference.broadcast(torch.tensor([os.getpid(), descriptor, nonce]), 0)
    pid, number, nonce = told.tolist()
    if native is None or number < 0:
        return None, reason
    try:
        if rank:
            descriptor = open_segment(pid, number, nonce, size)
        return Segment(native, descriptor, rank, size), reason
    except OSError as error:
        return None, str(error)


def _native() -> tuple[NativeLibrary | None, str]:
    try:
        return library(), "another rank cannot"
    except NativeUnavailable as error:
        return None, str(error)
