"""A complete reference device for the kernel tier, over any torch device string."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from cardan.core.interfaces.capabilities import Capabilities, DeviceInfo
from cardan.core.interfaces.communication import Communicator, GroupSpec
from cardan.core.interfaces.device import Device
from cardan.core.interfaces.memory import MemoryInfo
from cardan.core.interfaces.torch_communicator import TorchCommunicator
from cardan.core.interfaces.torch_memory import TorchAllocator


class TorchDevice(Device):
    """A synchronous device whose tensors live at ``torch_device``.

    Enough for every model on the reference operations; a platform overrides what it does better.
    """

    def __init__(
        self,
        info: DeviceInfo,
        capabilities: Capabilities,
        torch_device: str,
        memory_info: Callable[[], MemoryInfo],
    ) -> None:
        """``memory_info`` answers total and free bytes of the device."""
        self.info = info
        self.capabilities = capabilities
        self._torch_device = torch.device(torch_device)
        self._memory_info = memory_info
        self.memory = TorchAllocator(self._torch_device, memory_info)

    @property
    def torch_device(self) -> torch.device:
        return self._torch_device

    def memory_info(self) -> MemoryInfo:
        return self._memory_info()

    def synchronize(self) -> None:
        """Nothing is ever in flight on a synchronous device."""

    def communicator(self, group: GroupSpec) -> Communicator:
        return TorchCommunicator.join(group)

    def inference(self) -> AbstractContextManager[object]:
        return torch.inference_mode()

    def close(self) -> None:
        self.memory.close()
