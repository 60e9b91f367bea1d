"""The host's processors as an opened device."""

import torch

from cardan.core.interfaces.capabilities import Capabilities, DeviceInfo
from cardan.core.interfaces.memory import MemoryInfo
from cardan.core.interfaces.torch_device import TorchDevice
from cardan.platforms.cpu import host


def _memory_info() -> MemoryInfo:
    return MemoryInfo(total=host.total_memory(), free=host.free_memory(), exact=False)


class CpuDevice(TorchDevice):
    """Sets torch's thread count for the process while it is open, and puts it back."""

    def __init__(self, info: DeviceInfo, capabilities: Capabilities) -> None:
        super().__init__(info, capabilities, "cpu", _memory_info)
        self._threads_before = torch.get_num_threads()
        torch.set_num_threads(int(info.details.get("num_threads") or info.details["threads"]))

    def close(self) -> None:
        super().close()
        torch.set_num_threads(self._threads_before)
