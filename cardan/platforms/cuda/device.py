"""Which of torch's devices is the GPU that the driver named."""

from collections.abc import Mapping, Sequence

import torch

from cardan.core.interfaces.capabilities import Capabilities, DeviceInfo
from cardan.core.interfaces.errors import PluginError
from cardan.platforms.shared.gpu.device import GpuDevice


def open_device(info: DeviceInfo, capabilities: Capabilities) -> GpuDevice:
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
        return GpuDevice(info, capabilities, index)
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
