"""Memory of one GPU: pools, page-locked host memory, what is free, and sleep."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, UntypedStorage

from cardan.core.interfaces.attention import KVLayout
from cardan.core.interfaces.device import Event, Stream
from cardan.core.interfaces.errors import OutOfMemoryError
from cardan.core.interfaces.memory import HostPool, KVPool, MemoryInfo, MemoryStats, WakeReport
from cardan.core.interfaces.torch_device import TorchKVPool, TorchMemoryAllocator
from cardan.core.types.kv import KVCacheGroup
from cardan.platforms.shared.gpu.host_pool import GpuHostPool
from cardan.platforms.shared.gpu.sleep import SleepingStorages, StorageRecord
from cardan.platforms.shared.gpu.streams import GpuEvent, GpuStream

# The level of ``sleep`` that drops weights.
_DROPS = 2
_WEIGHTS = "weights"


def memory_info(device: torch.device) -> MemoryInfo:
    """What the driver has free, and what torch keeps without using it."""
    free, total = torch.cuda.mem_get_info(device)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return MemoryInfo(total=total, free=min(total, free + max(0, kept)))


class GpuMemoryAllocator(TorchMemoryAllocator):
    """Pools on one GPU. ``main`` is the stream that steps run on."""

    def __init__(self, device: torch.device, main: torch.cuda.Stream) -> None:
        super().__init__(device, lambda: memory_info(device))
        self._main = main
        self._host_pools: list[GpuHostPool] = []
        self._weights = StorageRecord(device)
        self._sleeping: dict[str, SleepingStorages] = {}
        self._lost: frozenset[str] = frozenset()

    def kv_pool(self, group: KVCacheGroup, layout: KVLayout, num_blocks: int) -> TorchKVPool:
        """Zeroed before it is returned, whichever stream uses it first."""
        # Blocks that torch keeps in other sizes are given back first: pools take nearly all.
        torch.cuda.empty_cache()
        with torch.cuda.stream(self._main):
            pool = super().kv_pool(group, layout, num_blocks)
        self._main.synchronize()
        return pool

    def peak_of(self, work: Callable[[], None]) -> int:
        """With what torch keeps between its blocks, and what kernels and libraries take of the
        driver without asking torch."""
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            reserved, others = torch.cuda.memory_reserved(), self._beside_torch()
            work()
            torch.cuda.synchronize()
            grown = max(0, self._beside_torch() - others)
            return torch.cuda.max_memory_reserved() - reserved + grown

    def _beside_torch(self) -> int:
        """Bytes in use of the GPU that torch's allocator knows nothing of."""
        free, total = torch.cuda.mem_get_info()
        return total - free - torch.cuda.memory_reserved()

    def copy_blocks(
        self, source: KVPool, target: KVPool, pairs: Tensor, stream: Stream | None = None
    ) -> Event | None:
        """On a stream of its own the copy begins after what the current one has queued. ``pairs``
        may be on the host."""
        if isinstance(stream, GpuStream):
            stream.wait(GpuEvent(torch.cuda.current_stream(self._device)))
            if pairs.is_cuda:
                pairs.record_stream(stream.stream)
        return super().copy_blocks(source, target, pairs, stream)

    def host_pool(self, num_bytes: int, pinned: bool = True) -> HostPool:
        pool = GpuHostPool(num_bytes, pinned, self._device)
        # Engines that sleep and wake make new ones every time.
        self._host_pools = [item for item in self._host_pools if not item.is_closed]
        self._host_pools.append(pool)
        return pool

    @contextmanager
    def region(self, tag: str) -> Iterator[None]:
        """What operations allocate in the region ``weights`` can sleep."""
        if tag != _WEIGHTS:
            with super().region(tag):
                yield
            return
        with super().region(tag), self._weights:
            yield

    def stats(self) -> MemoryStats:
        """What sleeps is none of the device's."""
        by_tag = super().stats().by_tag
        return MemoryStats({tag: 0 if tag in self._asleep else by_tag[tag] for tag in by_tag})

    def sleep(self, level: int, tags: Sequence[str]) -> None:
        """Free the memory of ``weights``, of ``kv``, or of both. Caches are never kept.

        No step may run until ``wake``, and graphs that were captured before are lost.

        Raises:
            UnsupportedError: another level or tag, or it sleeps already.
            OutOfMemoryError: the host has too little memory to keep the weights; all is as before.
        """
        wanted = self._check_sleep(level, tags)
        torch.cuda.synchronize(self._device)
        # Weights first: where the host cannot keep them nothing else has changed.
        for tag in sorted(wanted, reverse=True):
            storages = self._storages(tag)
            sleeping = SleepingStorages(self._kept_bytes)
            if tag == _WEIGHTS and level != _DROPS:
                sleeping.lay(storages, ())
            else:
                sleeping.lay((), storages)
            self._sleeping[tag] = sleeping
        self._asleep = wanted
        self._lost = (wanted if level == _DROPS else wanted - {_WEIGHTS}) | {"graphs"}
        torch.cuda.empty_cache()

    def wake(self, tags: Sequence[str] | None = None) -> WakeReport:
        """Undo ``sleep``, weights first; what is lost reads as zeros.

        Raises:
            UnsupportedError: none of ``tags`` sleeps.
            OutOfMemoryError: others took the memory meanwhile; it can be called again.
        """
        wanted = self._check_wake(tags)
        try:
            with torch.cuda.stream(self._main):
                for tag in sorted(wanted, reverse=True):
                    self._sleeping[tag].raise_all()
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(self._cannot_wake()) from error
        self._main.synchronize()
        for tag in wanted:
            del self._sleeping[tag]
        self._asleep -= wanted
        return WakeReport(self._lost & (wanted | {"graphs"}))

    def close(self) -> None:
        for pool in self._host_pools:
            pool.close()
        self._host_pools.clear()
        for sleeping in self._sleeping.values():
            sleeping.close()
        self._sleeping.clear()
        super().close()

    def _storages(self, tag: str) -> list[UntypedStorage]:
        """What has the tag; weights of pools are the pools'."""
        pools = [(of, pool.logical().untyped_storage()) for of, pool in self._pools]
        if tag != _WEIGHTS:
            return [storage for of, storage in pools if of == tag]
        known = {storage.data_ptr() for _, storage in pools}
        own = [item for item in self._weights.storages() if item.data_ptr() not in known]
        return [*own, *(storage for of, storage in pools if of == tag)]

    def _kept_bytes(self, num_bytes: int) -> HostPool:
        return GpuHostPool(num_bytes, True, self._device)
