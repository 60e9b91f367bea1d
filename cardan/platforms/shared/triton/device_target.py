"""The target of an open device.

Devices are known by the name that Triton's driver has for them. Of those that are not listed torch
tells the sizes, and their products are taken for those that tiles were first measured with.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from triton.runtime import driver

from cardan.platforms.shared.triton.targets import DeviceSizes, Target, target_named

# Where neither says: what the smallest ones have.
_DEFAULT_CORES = 8
_DEFAULT_SHARED_BYTES = 64 << 10
# What torch's modules of devices call these.
_CORES = ("multi_processor_count", "gpu_subslice_count")
_SHARED_BYTES = ("shared_memory_per_block_optin", "local_mem_size")


@cache
def target_of(device: torch.device) -> Target:
    """Of an open device. The host stands for one that nothing is known of: the interpreter's."""
    if device.type == "cpu":
        return Target()
    return target_named(driver.active.get_current_target().arch)


def product_options(device: torch.device) -> Mapping[str, Any]:
    """Named arguments for launches of kernels that multiply matrices."""
    return target_of(device).options


def settling(device: torch.device) -> str:
    """As of ``Target``, for kernels that take SETTLING."""
    return target_of(device).settling


def device_sizes(device: torch.device) -> DeviceSizes:
    target, properties = target_of(device), None
    if device.type != "cpu":
        properties = torch.get_device_module(device).get_device_properties(device)
    shared_bytes = target.shared_bytes
    if shared_bytes is None:
        shared_bytes = _first(properties, _SHARED_BYTES, _DEFAULT_SHARED_BYTES)
    return DeviceSizes(
        _first(properties, _CORES, _DEFAULT_CORES),
        shared_bytes,
        target.products,
        target.copies_directly,
    )


def _first(properties: Any, names: Sequence[str], default: int) -> int:
    """The first of these that a device has."""
    return next(
        (int(getattr(properties, name)) for name in names if hasattr(properties, name)), default
    )
