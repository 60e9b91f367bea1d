"""A GPU as an opened device."""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from cardan.core.interfaces.capabilities import Capabilities, DeviceInfo
from cardan.core.interfaces.device import Event, Stream
from cardan.core.interfaces.errors import PluginError
from cardan.core.interfaces.graphs import Graph
from cardan.core.interfaces.torch_device import TorchDevice
from cardan.platforms.cuda.graph import CudaGraph, capture_graph
from cardan.platforms.cuda.memory import CudaMemoryAllocator, memory_info
from cardan.platforms.cuda.streams import CudaEvent, CudaStream


class CudaDevice(TorchDevice):
    """One GPU and the stream that its steps run on.

    That stream does not wait for the default one: what the host reads back outside of
    ``inference`` waits for the event it was told to wait for, not for steps queued since.
    """

    def __init__(self, info: DeviceInfo, capabilities: Capabilities, index: int) -> None:
        device = torch.device("cuda", index)
        super().__init__(info, capabilities, str(device), lambda: memory_info(device))
        self._main = torch.cuda.Stream(device)
        self.memory = CudaMemoryAllocator(device, self._main)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._torch_device)

    def stream(self, priority: int = 0) -> Stream:
        return CudaStream(torch.cuda.Stream(self._torch_device, priority=priority))

    def event(self) -> Event:
        """After all work of the current stream of this device."""
        return CudaEvent(torch.cuda.current_stream(self._torch_device))

    def capture(self, launch: Callable[[], None], pool: Graph | None = None) -> CudaGraph:
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


def open_device(info: DeviceInfo, capabilities: Capabilities) -> CudaDevice:
    """Open the GPU that NVML knows by ``info``'s UUID: torch may count devices in another order.

    Raises:
        PluginError: torch does not see it, or cannot start CUDA.
    """
    try:
        uuids = [
            str(torch.cuda.get_device_properties(index).uuid)
            for index in range(torch.cuda.device_count())
        ]
    except RuntimeError as error:
        raise PluginError(f"torch {torch.__version__} cannot start CUDA: {error}") from error
    index = _index(info.details, uuids)
    if index is not None:
        return CudaDevice(info, capabilities, index)
    raise PluginError(
        f"torch {torch.__version__} does not see {info.name} ({info.details.get('uuid')}) among "
        f"its {len(uuids)} CUDA devices; if CUDA_VISIBLE_DEVICES has numbers, set "
        "CUDA_DEVICE_ORDER=PCI_BUS_ID, so that they mean the same devices for CUDA as for the "
        f"driver; else the driver ({info.details.get('driver')}) may be too old for this build of "
        "torch"
    )


def _index(details: Mapping[str, str], uuids: Sequence[str]) -> int | None:
    """The CUDA device with the UUID; an instance of a divided GPU is the only one of its process,
    and may go by the whole GPU's."""
    uuid = details.get("uuid", "")
    wanted = uuid.removeprefix("GPU-").removeprefix("MIG-")
    if wanted in uuids:
        return uuids.index(wanted)
    return 0 if uuid.startswith("MIG-") and len(uuids) == 1 else None
