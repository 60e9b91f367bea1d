"""Memory of one GPU: pools, page-locked host memory, and what is free."""

import torch
from torch import Tensor

from cardan.core.interfaces.attention import KVLayout
from cardan.core.interfaces.device import Event, Stream
from cardan.core.interfaces.memory import HostPool, KVPool, MemoryInfo
from cardan.core.interfaces.torch_device import TorchKVPool, TorchMemoryAllocator
from cardan.core.types.kv import KVCacheGroup
from cardan.platforms.cuda.streams import CudaEvent, CudaStream


def memory_info(device: torch.device) -> MemoryInfo:
    """What the driver has free, and what torch keeps without using it."""
    free, total = torch.cuda.mem_get_info(device)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return MemoryInfo(total=total, free=min(total, free + max(0, kept)))


class CudaMemoryAllocator(TorchMemoryAllocator):
    """Pools on one GPU. ``main`` is the stream that steps run on."""

    def __init__(self, device: torch.device, main: torch.cuda.Stream) -> None:
        super().__init__(device, lambda: memory_info(device))
        self._main = main
        self._host_pools: list[CudaHostPool] = []

    def kv_pool(self, group: KVCacheGroup, layout: KVLayout, num_blocks: int) -> TorchKVPool:
        """Zeroed before it is returned, whichever stream uses it first."""
        # Blocks that torch keeps in other sizes are given back first: pools take nearly all.
        torch.cuda.empty_cache()
        with torch.cuda.stream(self._main):
            pool = super().kv_pool(group, layout, num_blocks)
        self._main.synchronize()
        return pool

    def copy_blocks(
        self, source: KVPool, target: KVPool, pairs: Tensor, stream: Stream | None = None
    ) -> Event | None:
        """On a stream of its own the copy begins after what the current one has queued."""
        if isinstance(stream, CudaStream):
            stream.wait(CudaEvent(torch.cuda.current_stream(pairs.device)))
            pairs.record_stream(stream.stream)
        return super().copy_blocks(source, target, pairs, stream)

    def host_pool(self, num_bytes: int, pinned: bool = True) -> HostPool:
        pool = CudaHostPool(num_bytes, pinned)
        self._host_pools.append(pool)
        return pool

    def close(self) -> None:
        for pool in self._host_pools:
            pool.close()
        self._host_pools.clear()
        super().close()


class CudaHostPool(HostPool):
    """Host memory, page-locked where asked for."""

    def __init__(self, num_bytes: int, pinned: bool) -> None:
        self.num_bytes = num_bytes
        self._tensor: Tensor | None = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=pinned)

    def buffer(self) -> memoryview:
        if self._tensor is None:
            raise ValueError("this host pool was closed")
        return self._tensor.numpy().data

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        self._tensor = None
