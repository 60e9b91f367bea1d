"""A device without torch tensors."""

from typing import TYPE_CHECKING

from cardan.core.interfaces.capabilities import DeviceInfo
from cardan.core.interfaces.communication import Communicator, GroupSpec
from cardan.core.interfaces.device import Device
from cardan.core.interfaces.errors import UnsupportedError
from cardan.core.interfaces.memory import MemoryInfo

if TYPE_CHECKING:
    import torch


class AcmeDevice(Device):
    def __init__(self, info: DeviceInfo) -> None:
        self.info = info

    @property
    def torch_device(self) -> "torch.device | None":
        return None

    def memory_info(self) -> MemoryInfo:
        return MemoryInfo(total=8 * 2**30, free=6 * 2**30, exact=False)

    def synchronize(self) -> None:
        pass

    def communicator(self, group: GroupSpec) -> Communicator:
        raise UnsupportedError("rockets fly alone")

    def close(self) -> None:
        pass
