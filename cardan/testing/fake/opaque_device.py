"""A device that only its own executor can address: no torch tensors, no pools, one queue."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cardan.core.interfaces.attention import KVLayout
from cardan.core.interfaces.capabilities import Capabilities, DeviceInfo
from cardan.core.interfaces.communication import Communicator, GroupSpec
from cardan.core.interfaces.device import Device, Event, Stream
from cardan.core.interfaces.errors import OutOfMemoryError, UnsupportedError
from cardan.core.interfaces.memory import KVPool, MemoryAllocator, MemoryInfo, MemoryStats
from cardan.core.types.kv import KVCacheGroup
from cardan.testing.fake.counters import DeviceCounters
from cardan.testing.fake.queue import DeviceQueue, StepClock
from cardan.testing.fake.settings import FakeSettings
from cardan.testing.fake.step_faults import StepFaults

if TYPE_CHECKING:
    import torch

_OPAQUE = "the caches of this device belong to its executor"


class OpaqueMemory(MemoryAllocator):
    """A budget, and what was taken from it by tag; the arrays are the executor's."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._taken: dict[str, int] = {}

    @property
    def free(self) -> int:
        return self._total - sum(self._taken.values())

    def take(self, tag: str, num_bytes: int) -> None:
        """Account for an allocation.

        Raises:
            OutOfMemoryError: it does not fit.
        """
        if num_bytes > self.free:
            raise OutOfMemoryError(
                f"{tag} need {num_bytes / 2**20:.1f} MiB, the fake device has "
                f"{self.free / 2**20:.1f} MiB free; give it more with memory_mb"
            )
        self._taken[tag] = self._taken.get(tag, 0) + num_bytes

    def kv_pool(self, group: KVCacheGroup, layout: KVLayout, num_blocks: int) -> KVPool:
        raise UnsupportedError(_OPAQUE)

    def copy_blocks(
        self,
        source: KVPool,
        target: KVPool,
        pairs: "torch.Tensor",
        stream: Stream | None = None,
    ) -> Event | None:
        raise UnsupportedError(_OPAQUE)

    def stats(self) -> MemoryStats:
        return MemoryStats(dict(self._taken))

    @contextmanager
    def region(self, tag: str) -> Iterator[None]:
        yield

    def sleep(self, level: int, tags: Sequence[str]) -> None:
        raise UnsupportedError("this device cannot sleep")

    def close(self) -> None:
        self._taken.clear()


class OpaqueDevice(Device):
    """Owner of one queue of whole steps."""

    memory: OpaqueMemory

    def __init__(
        self, info: DeviceInfo, capabilities: Capabilities, settings: FakeSettings
    ) -> None:
        self.info = info
        self.capabilities = capabilities
        self.memory = OpaqueMemory(settings.memory_mb << 20)
        self.counters = DeviceCounters()
        self._total = settings.memory_mb << 20
        self._faults = StepFaults(settings)
        self._clock = StepClock(self.counters, self._faults, settings.step_ms / 1000, 0.0)
        self.queue = DeviceQueue(info.name, self._clock)

    def end_step(self) -> None:
        """Queue the end of a step, after which its results may be seen."""
        self.queue.submit(lambda: self._clock.end(self.queue))

    @property
    def torch_device(self) -> None:
        return None

    def memory_info(self) -> MemoryInfo:
        return MemoryInfo(self._total, self.memory.free)

    def synchronize(self) -> None:
        self.queue.drain()

    def communicator(self, group: GroupSpec) -> Communicator:
        raise UnsupportedError("the fake executor runs on one device")

    def close(self) -> None:
        self._faults.release()
        self.queue.close()
        self.memory.close()
