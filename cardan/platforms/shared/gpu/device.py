"""A GPU as an opened device. HIP's devices go by ``torch.cuda``, too."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from cardan.core.interfaces.capabilities import Capabilities, DeviceInfo
from cardan.core.interfaces.device import Event, Stream
from cardan.core.interfaces.graphs import Graph
from cardan.core.interfaces.torch_device import TorchDevice
from cardan.platforms.shared.gpu.graph import GpuGraph, capture_graph
from cardan.platforms.shared.gpu.memory import GpuMemoryAllocator, memory_info
from cardan.platforms.shared.gpu.streams import GpuEvent, GpuStream


class GpuDevice(TorchDevice):
    """One GPU and the stream that its steps run on.

    That stream does not wait for the default one: what the host reads back outside of
    ``inference`` waits for the event it was told to wait for, not for steps queued since.
    """

    def __init__(self, info: DeviceInfo, capabilities: Capabilities, index: int) -> None:
        device = torch.device("cuda", index)
        super().__init__(info, capabilities, str(device), lambda: memory_info(device))
        self._main = torch.cuda.Stream(device)
        self.memory = GpuMemoryAllocator(device, self._main)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._torch_device)

    def stream(self, priority: int = 0) -> Stream:
        return GpuStream(torch.cuda.Stream(self._torch_device, priority=priority))

    def event(self) -> Event:
        """After all work of the current stream of this device."""
        return GpuEvent(torch.cuda.current_stream(self._torch_device))

    def capture(self, launch: Callable[[], None], pool: Graph | None = None) -> GpuGraph:
        with torch.cuda.device(self._torch_device):
            return capture_graph(launch, self._main, pool)

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Autograd off, this device current, and its own stream."""
        with torch.inference_mode(), torch.cuda.stream(self._main):
            yield

    def close(self) -> None:
        """Free the pools and what torch keeps of freed tensors; of a device that failed, too."""
        try:
            self.synchronize()
        finally:
            super().close()
            gc.collect()  # a model's modules refer to each other
            with torch.cuda.device(self._torch_device):
                torch.cuda.empty_cache()
