"""Which of torch's devices is the GPU that the driver named."""

from collections.abc import Sequence
from typing import Any

import torch

from cardan.core.interfaces.capabilities import Capabilities, DeviceInfo
from cardan.core.interfaces.errors import PluginError
from cardan.platforms.shared.gpu.device import GpuDevice


def open_device(info: DeviceInfo, capabilities: Capabilities) -> GpuDevice:
    """Open the GPU at ``info``'s PCI address; HIP's devices are those of ``torch.cuda``.

    Parts of a divided GPU have one address: they, and devices of a torch that tells no addresses,
    are known by their place among the visible ones.

    Raises:
        PluginError: torch is no build for ROCm, cannot start HIP, does not see the device, or has
            no kernels for it.
    """
    if torch.version.hip is None:
        raise PluginError(
            f"torch {torch.__version__} is no build for ROCm; install one (docs/rocm.md)"
        )
    try:
        found = [
            torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())
        ]
    except RuntimeError as error:
        raise PluginError(f"torch {torch.__version__} cannot start HIP: {error}") from error
    index = _index(info, found)
    if index is None:
        raise PluginError(
            f"torch {torch.__version__} does not see {info.name} ({info.details.get('bus')}, "
            f"{info.arch}) among its {len(found)} devices; the driver "
            f"({info.details.get('driver') or 'of unknown version'}) may be too old for ROCm "
            f"{torch.version.hip}, or /dev/dri/{info.details.get('render')} is not this process's "
            "to open: add its user to the groups render and video"
        )
    built_for = [name.partition(":")[0] for name in torch.cuda.get_arch_list()]
    if built_for and info.arch not in built_for:
        raise PluginError(
            f"torch {torch.__version__} has no kernels for {info.name} ({info.arch}), only for "
            f"{', '.join(built_for)}; install a build that has them"
        )
    return GpuDevice(info, capabilities, index)


def _index(info: DeviceInfo, found: Sequence[Any]) -> int | None:
    # A function of the address counts parts of a divided GPU for the driver, and not for HIP.
    wanted = info.details.get("bus", "").partition(".")[0]
    placed = [index for index, item in enumerate(found) if _address(item) == wanted]
    if len(placed) != 1:
        ordinal = int(info.details.get("ordinal", info.index))
        is_told = any(_address(item) is not None for item in found)
        candidates = placed if is_told else range(len(found))
        placed = [ordinal] if ordinal in candidates else []
    return next((index for index in placed if _arch(found[index]) == info.arch), None)


def _address(properties: Any) -> str | None:
    bus = getattr(properties, "pci_bus_id", None)
    if bus is None:
        return None
    return f"{properties.pci_domain_id:04x}:{bus:02x}:{properties.pci_device_id:02x}"


def _arch(properties: Any) -> str:
    """Without what is switched on beside it (``gfx942:sramecc+:xnack-``)."""
    return str(properties.gcnArchName).partition(":")[0]
