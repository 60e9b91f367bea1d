"""One of Intel's GPUs as an opened device.

Reviewed against torch's own sources and run against a made-up runtime; it has met no hardware yet.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from cardan.core.interfaces.capabilities import Capabilities, DeviceInfo
from cardan.core.interfaces.communication import Communicator, GroupSpec
from cardan.core.interfaces.device import Event, Stream
from cardan.core.interfaces.errors import PluginError
from cardan.core.interfaces.graphs import Graph
from cardan.core.interfaces.memory import MemoryInfo
from cardan.core.interfaces.torch_communicator import TorchCommunicator
from cardan.core.interfaces.torch_device import TorchDevice
from cardan.platforms.xpu.graph import XpuGraph, capture_graph
from cardan.platforms.xpu.memory import HostMemory, XpuMemoryAllocator, memory_info
from cardan.platforms.xpu.streams import XpuEvent, XpuStream


class XpuDevice(TorchDevice):
    """One GPU and the stream that its steps run on."""

    def __init__(
        self, info: DeviceInfo, capabilities: Capabilities, index: int, host: HostMemory
    ) -> None:
        device = torch.device("xpu", index)

        def measured() -> MemoryInfo:
            return memory_info(device, host, capabilities.unified_memory)

        super().__init__(info, capabilities, str(device), measured)
        self._main = torch.xpu.Stream(device)
        self.memory = XpuMemoryAllocator(device, self._main, measured)

    def synchronize(self) -> None:
        torch.xpu.synchronize(self._torch_device)

    def stream(self, priority: int = 0) -> Stream:
        return XpuStream(torch.xpu.Stream(self._torch_device, priority=priority))

    def event(self) -> Event:
        """After all work of the current stream of this device."""
        return XpuEvent(torch.xpu.current_stream(self._torch_device))

    def capture(self, launch: Callable[[], None], pool: Graph | None = None) -> XpuGraph:
        with torch.xpu.device(self._torch_device):
            return capture_graph(launch, self._main, pool)

    def communicator(self, group: GroupSpec) -> Communicator:
        """Over XCCL where torch has it; else through the host."""
        if not dist.is_xccl_available():
            return super().communicator(group)
        with torch.xpu.device(self._torch_device):
            made = TorchCommunicator(group, self._torch_device, xccl_group, staged=False)
        self._communicators.append(made)
        return made

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Autograd off, this device current, and its own stream."""
        with torch.inference_mode(), torch.xpu.stream(self._main):
            yield

    def close(self) -> None:
        """Free the pools and what torch keeps of freed tensors; of a device that failed, too."""
        try:
            self.synchronize()
        finally:
            super().close()
            gc.collect()  # a model's modules refer to each other
            torch.xpu.empty_cache()


def xccl_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """A group of torch's back end for these devices."""
    options = dist.ProcessGroupXCCL.Options()
    options._timeout = timeout  # noqa: SLF001 (as torch sets it, there is no other way)
    return dist.ProcessGroupXCCL(store, rank, size, options)


def open_device(info: DeviceInfo, capabilities: Capabilities, host: HostMemory) -> XpuDevice:
    """Open the GPU with ``info``'s PCI device id; of several alike the one at its place among them.

    Raises:
        PluginError: torch does not see it, or cannot start the runtime.
    """
    try:
        ids = [
            int(torch.xpu.get_device_properties(index).device_id)
            for index in range(torch.xpu.device_count())
        ]
    except RuntimeError as error:
        raise PluginError(f"torch {torch.__version__} cannot start Level Zero: {error}") from error
    index = _index(info, ids)
    if index is not None:
        return XpuDevice(info, capabilities, index, host)
    seen = ", ".join(f"{item:#06x}" for item in ids) or "none"
    raise PluginError(
        f"torch {torch.__version__} does not see {info.name} (PCI device "
        f"{info.details.get('device_id')}) among its XPU devices ({seen}); if ZE_AFFINITY_MASK is "
        "set, set ZE_ENABLE_PCI_ID_DEVICE_ORDER=1, so that its numbers mean the same devices for "
        "the driver; else Intel's compute runtime may be too old for this GPU"
    )


def _index(info: DeviceInfo, ids: Sequence[int]) -> int | None:
    """Torch's number: the platform's own where the device there is of this kind, else that of the
    only one of its kind."""
    wanted = int(info.details.get("device_id", "0"), 16)
    if info.index < len(ids) and ids[info.index] == wanted:
        return info.index
    alike = [index for index, item in enumerate(ids) if item == wanted]
    return alike[0] if len(alike) == 1 else None
