"""The CPU as an opened device."""

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
