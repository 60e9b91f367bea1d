"""Memory of one of Intel's GPUs: pools, page-locked host memory, and what is free."""

from collections.abc import Callable

import torch
from torch import Tensor

from cardan.core.interfaces.attention import KVLayout
from cardan.core.interfaces.device import Event, Stream
from cardan.core.interfaces.errors import ConfigError, OutOfMemoryError
from cardan.core.interfaces.memory import HostPool, KVPool, MemoryInfo
from cardan.core.interfaces.torch_device import TorchKVPool, TorchMemoryAllocator
from cardan.core.types.kv import KVCacheGroup
from cardan.platforms.xpu.streams import XpuEvent, XpuStream

# Total and available bytes of the host; None: not known.
HostMemory = Callable[[], tuple[int, int] | None]


def memory_info(device: torch.device, host: HostMemory, is_integrated: bool) -> MemoryInfo:
    """What the driver has free, and what torch keeps without using it.

    Drivers refuse to tell for integrated GPUs, and for others where their management interface is
    off. Then what this process does not hold counts as free, of an integrated GPU at most what the
    host has available; that is not exact.
    """
    kept = torch.xpu.memory_reserved(device) - torch.xpu.memory_allocated(device)
    try:
        free, total = torch.xpu.mem_get_info(device)
    except RuntimeError:
        total = int(torch.xpu.get_device_properties(device).total_memory)
        free = max(0, total - torch.xpu.memory_reserved(device))
        known = host() if is_integrated else None
        if known is not None:
            total, free = min(total, known[0]), min(free, known[1])
        return MemoryInfo(total, min(total, free + max(0, kept)), exact=False)
    return MemoryInfo(total, min(total, free + max(0, kept)))


class XpuHostPool(HostPool):
    """Host memory by torch, page-locked where asked for: rounded up as torch does."""

    def __init__(self, num_bytes: int, pinned: bool) -> None:
        """
        Raises:
            ConfigError: ``num_bytes`` is negative.
            OutOfMemoryError: the host has too little memory.
        """
        if num_bytes < 0:
            raise ConfigError(f"a host pool of {num_bytes} bytes; num_bytes must be at least 0")
        self.num_bytes = num_bytes
        try:
            tensor = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        except (RuntimeError, MemoryError) as error:
            raise OutOfMemoryError(
                f"a host pool of {num_bytes / 2**20:.1f} MiB does not fit; make it smaller"
            ) from error
        self._tensor: Tensor | None = tensor

    @property
    def is_closed(self) -> bool:
        return self._tensor is None

    def buffer(self) -> memoryview:
        if self._tensor is None:
            raise ValueError("this host pool was closed")
        return self._tensor.numpy().data

    def close(self) -> None:
        """Idempotent."""
        self._tensor = None


class XpuMemoryAllocator(TorchMemoryAllocator):
    """Pools on one GPU. ``main`` is the stream that steps run on."""

    def __init__(
        self,
        device: torch.device,
        main: torch.xpu.Stream,
        info: Callable[[], MemoryInfo],
    ) -> None:
        super().__init__(device, info)
        self._main = main
        self._host_pools: list[XpuHostPool] = []

    def kv_pool(self, group: KVCacheGroup, layout: KVLayout, num_blocks: int) -> TorchKVPool:
        """Zeroed before it is returned, whichever stream uses it first."""
        # Blocks that torch keeps in other sizes are given back first: pools take nearly all.
        torch.xpu.empty_cache()
        with torch.xpu.stream(self._main):
            pool = super().kv_pool(group, layout, num_blocks)
        self._main.synchronize()
        return pool

    def peak_of(self, work: Callable[[], None]) -> int:
        """With what torch keeps between its blocks."""
        torch.xpu.synchronize(self._device)
        torch.xpu.empty_cache()
        torch.xpu.reset_peak_memory_stats(self._device)
        before = torch.xpu.memory_reserved(self._device)
        work()
        torch.xpu.synchronize(self._device)
        return torch.xpu.max_memory_reserved(self._device) - before

    def copy_blocks(
        self, source: KVPool, target: KVPool, pairs: Tensor, stream: Stream | None = None
    ) -> Event | None:
        """On a stream of its own the copy begins after what the current one has queued. ``pairs``
        may be on the host."""
        if isinstance(stream, XpuStream):
            stream.wait(XpuEvent(torch.xpu.current_stream(self._device)))
            if pairs.device == self._device:
                pairs.record_stream(stream.stream)
        return super().copy_blocks(source, target, pairs, stream)

    def host_pool(self, num_bytes: int, pinned: bool = True) -> HostPool:
        pool = XpuHostPool(num_bytes, pinned)
        self._host_pools = [item for item in self._host_pools if not item.is_closed]
        self._host_pools.append(pool)
        return pool

    def close(self) -> None:
        for pool in self._host_pools:
            pool.close()
        self._host_pools.clear()
        super().close()
