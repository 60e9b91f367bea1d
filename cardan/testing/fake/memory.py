"""Memory of the fake device: a budget of bytes, kept exactly."""

from collections.abc import Callable, Iterator, Set
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from cardan.core.interfaces.device import Event, Stream
from cardan.core.interfaces.errors import ConfigError, OutOfMemoryError, UnsupportedError
from cardan.core.interfaces.memory import HostPool, KVPool, MemoryInfo, MemoryStats
from cardan.core.interfaces.torch_device import TorchMemoryAllocator


class FakeHostPool(HostPool):
    """A span of bytes."""

    def __init__(self, num_bytes: int) -> None:
        self._bytes: bytearray | None = bytearray(num_bytes)
        self.num_bytes = num_bytes

    def buffer(self) -> memoryview:
        if self._bytes is None:
            raise UnsupportedError("this host pool was closed")
        return memoryview(self._bytes)

    def close(self) -> None:
        self._bytes = None
        self.num_bytes = 0


class _Watch:
    """Counts storages for as long as they live."""

    def __init__(self, drain: Callable[[], None]) -> None:
        self.peak = 0
        self._drain = drain
        self._live: list[tuple[StorageWeakRef, int]] = []

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._live.append((StorageWeakRef(storage), storage.nbytes()))
        if self._count() > self.peak:
            # Whatever is only held until the device has used it is then no longer there.
            self._drain()
            self.peak = max(self.peak, self._count())

    def _count(self) -> int:
        self._live = [item for item in self._live if not item[0].expired()]
        return sum(num_bytes for _, num_bytes in self._live)


class FakeMemory(TorchMemoryAllocator):
    """Counts pools and whatever is allocated inside a region, for as long as it lives.

    What steps allocate outside regions is not counted, except by ``peak_of``.
    """

    def __init__(
        self,
        total: int,
        inference: Callable[[], AbstractContextManager[object]],
        drain: Callable[[], None],
        faults: Set[str],
        tells_peak: bool = False,
    ) -> None:
        """``inference`` and ``drain`` are the device's; ``total`` in bytes. ``tells_peak``: whether
        ``peak_of`` answers."""
        super().__init__(torch.device("cpu"), self.info)
        self._total = total
        self._inference = inference
        self._drain = drain
        self._loses_copies = "lost_copy" in faults
        self._leaks = "leak" in faults
        self._tagged: list[tuple[str, StorageWeakRef, int]] = []
        self._host_pools: list[FakeHostPool] = []
        self._tells_peak = tells_peak
        self._watch: _Watch | None = None

    def info(self) -> MemoryInfo:
        return MemoryInfo(self._total, max(0, self._total - self._used))

    def allocated(self, tensor: Tensor) -> None:
        """Take note of new device memory."""
        if self._watch is not None:
            self._watch.add(tensor)
        if self._tags:
            storage = tensor.untyped_storage()
            self._tagged.append((self._tags[-1], StorageWeakRef(storage), storage.nbytes()))

    def allocate_bytes(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8 for graphs.

        Raises:
            OutOfMemoryError: they do not fit.
        """
        self._check(num_bytes, "graphs", "set device.enforce_eager")
        tensor = torch.empty(num_bytes, dtype=torch.uint8)
        self.allocated(tensor)
        return tensor

    def copy_blocks(
        self, source: KVPool, target: KVPool, pairs: Tensor, stream: Stream | None = None
    ) -> Event | None:
        if self._loses_copies:
            return None if stream is None else stream.record()
        with self._inference():
            return super().copy_blocks(source, target, pairs, stream)

    def host_pool(self, num_bytes: int, pinned: bool = True) -> FakeHostPool:
        if num_bytes < 0:
            raise ConfigError(f"a host pool of {num_bytes} bytes; num_bytes must be at least 0")
        pool = FakeHostPool(num_bytes)
        self._host_pools.append(pool)
        return pool

    def peak_of(self, work: Callable[[], None]) -> int | None:
        """Exact for what is allocated inside ``inference``; drains where it grows."""
        if not self._tells_peak:
            return None
        self._drain()
        watch = self._watch = _Watch(self._drain)
        try:
            work()
            self._drain()
        finally:
            self._watch = None
        return watch.peak

    def stats(self) -> MemoryStats:
        self._tagged = [item for item in self._tagged if not item[1].expired()]
        by_tag: dict[str, int] = {}
        for tag, pool in self._pools:
            by_tag[tag] = by_tag.get(tag, 0) + pool.num_bytes
        for tag, _, num_bytes in self._tagged:
            # What sleeps poses as being on the host.
            by_tag[tag] = by_tag.get(tag, 0) + (0 if tag in self._asleep else num_bytes)
        return MemoryStats(by_tag)

    @contextmanager
    def region(self, tag: str) -> Iterator[None]:
        self._tags.append(tag)
        try:
            yield
            # Temporaries are held until the device has used them.
            self._drain()
            self._check(0, tag, "take a smaller model")
        finally:
            self._tags.pop()

    def close(self) -> None:
        for pool in self._host_pools:
            pool.close()
        self._host_pools.clear()
        if self._leaks:
            return
        super().close()
        self._tagged.clear()

    @property
    def _used(self) -> int:
        return sum(self.stats().by_tag.values())

    def _check(self, more: int, what: str, remedy: str) -> None:
        needed = self._used + more
        if needed > self._total:
            raise OutOfMemoryError(
                f"{what} need {needed / 2**20:.1f} MiB with what is allocated, the device has "
                f"{self._total / 2**20:.1f} MiB; {remedy}, or raise memory_mb"
            )
