"""The CPU as an opened device."""

import contextlib
import ctypes
import gc
from collections.abc import Callable

import torch

from cardan.core.interfaces.capabilities import Capabilities, DeviceInfo
from cardan.core.interfaces.memory import MemoryInfo
from cardan.core.interfaces.torch_device import TorchDevice


class CpuDevice(TorchDevice):
    """Host memory, and torch's pool of threads, whose size is set when the device is opened."""

    def __init__(
        self,
        info: DeviceInfo,
        capabilities: Capabilities,
        memory_info: Callable[[], MemoryInfo],
        num_threads: int,
    ) -> None:
        super().__init__(info, capabilities, "cpu", memory_info)
        torch.set_num_threads(num_threads)

    def close(self) -> None:
        """Free the pools, and hand what the allocator keeps of freed weights back to the host."""
        super().close()
        gc.collect()  # a model's modules refer to each other
        with contextlib.suppress(OSError, AttributeError):  # glibc alone has it
            ctypes.CDLL(None).malloc_trim(0)
