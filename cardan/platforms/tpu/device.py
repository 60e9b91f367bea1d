"""One opened TPU, or the host that stands for one."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import jax

from cardan.core.interfaces.attention import KVLayout
from cardan.core.interfaces.capabilities import Capabilities, DeviceInfo
from cardan.core.interfaces.communication import Communicator, GroupSpec
from cardan.core.interfaces.device import Device, Event, Stream
from cardan.core.interfaces.errors import UnsupportedError
from cardan.core.interfaces.memory import KVPool, MemoryAllocator, MemoryInfo, MemoryStats
from cardan.core.types.kv import KVCacheGroup
from cardan.platforms.tpu.placement import Placement

if TYPE_CHECKING:
    import torch

_OWN = "the caches of this device belong to its executor"


class TpuMemory(MemoryAllocator):
    """Bytes by tag, as the executor notes them: XLA owns the arrays."""

    def __init__(self) -> None:
        self._noted: dict[str, int] = {}

    def note(self, tag: str, num_bytes: int) -> None:
        self._noted[tag] = num_bytes

    def kv_pool(self, group: KVCacheGroup, layout: KVLayout, num_blocks: int) -> KVPool:
        raise UnsupportedError(_OWN)

    def copy_blocks(
        self,
        source: KVPool,
        target: KVPool,
        pairs: "torch.Tensor",
        stream: Stream | None = None,
    ) -> Event | None:
        raise UnsupportedError(_OWN)

    def stats(self) -> MemoryStats:
        return MemoryStats(dict(self._noted))

    @contextmanager
    def region(self, tag: str) -> Iterator[None]:
        yield

    def close(self) -> None:
        self._noted.clear()


class TpuDevice(Device):
    """The devices of ``placement``: programs run on all of them."""

    memory: TpuMemory

    def __init__(
        self, info: DeviceInfo, capabilities: Capabilities, devices: Sequence[Any]
    ) -> None:
        self.info = info
        self.capabilities = capabilities
        self.memory = TpuMemory()
        self.placement = Placement.on(devices)
        self._devices = tuple(devices)

    @property
    def is_host(self) -> bool:
        """Whether XLA compiles for the host's processor."""
        return bool(self._devices[0].platform == "cpu")

    @property
    def torch_device(self) -> None:
        return None

    def memory_info(self) -> MemoryInfo:
        """Of all devices together, as the fullest of them has it."""
        stats = [device.memory_stats() for device in self._devices]
        if not all(stats):
            page = os.sysconf("SC_PAGE_SIZE")
            total, free = (os.sysconf(name) * page for name in ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES"))
            return MemoryInfo(total, free, exact=False)
        total = min(item["bytes_limit"] for item in stats)
        free = min(item["bytes_limit"] - item["bytes_in_use"] for item in stats)
        return MemoryInfo(total * len(stats), free * len(stats))

    def synchronize(self) -> None:
        jax.effects_barrier()

    def communicator(self, group: GroupSpec) -> Communicator:
        raise UnsupportedError("programs run on all their devices; there are no ranks to join")

    def close(self) -> None:
        self.memory.close()
