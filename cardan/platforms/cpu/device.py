"""The CPU as an opened device."""

import contextlib
import ctypes
import gc
from collections.abc import Callable

import torch

from cardan.core.interfaces.capabilities import Capabilities, DeviceInfo
from cardan.core.interfaces.communication import Communicator, GroupSpec
from cardan.core.interfaces.graphs import Graph
from cardan.core.interfaces.memory import MemoryInfo
from cardan.core.interfaces.torch_device import TorchDevice
from cardan.platforms.cpu.communicator import join
from cardan.platforms.cpu.graph import CpuGraph, capture_graph
from cardan.platforms.cpu.graph_memory import GraphMemory
from cardan.platforms.cpu.native.library import library
from cardan.platforms.cpu.placement import Placement


class CpuDevice(TorchDevice):
    """Host memory, and torch's pool of threads, whose size is set when the device is opened."""

    def __init__(
        self,
        info: DeviceInfo,
        capabilities: Capabilities,
        memory_info: Callable[[], MemoryInfo],
        placement: Placement,
    ) -> None:
        super().__init__(info, capabilities, "cpu", memory_info)
        self._binding = placement.bind()
        torch.set_num_threads(placement.num_threads)

    def communicator(self, group: GroupSpec) -> Communicator:
        """Ranks on this host exchange through memory that they share."""
        joined = join(group)
        self._communicators.append(joined)
        return joined

    def capture(self, launch: Callable[[], None], pool: Graph | None = None) -> Graph:
        """Run ``launch`` and take down its calls, of native kernels and of torch.

        Raises:
            UnsupportedError: there are no native kernels, or ``launch`` does what a graph cannot.
        """
        memory = pool.memory if isinstance(pool, CpuGraph) else GraphMemory()
        return capture_graph(library(), launch, memory)

    def close(self) -> None:
        """Free the pools, and hand what the allocator keeps of freed weights back to the host."""
        super().close()
        self._binding.release()
        gc.collect()  # a model's modules refer to each other
        with contextlib.suppress(OSError, AttributeError):  # glibc alone has it
            ctypes.CDLL(None).malloc_trim(0)
