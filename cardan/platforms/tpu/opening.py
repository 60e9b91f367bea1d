"""Starts the runtime. Nothing else of the platform does."""

import contextlib
import os
from pathlib import Path

import jax

from cardan.core.interfaces.capabilities import Capabilities, DeviceInfo
from cardan.core.interfaces.errors import PluginError
from cardan.platforms.tpu.device import TpuDevice
from cardan.platforms.tpu.platform import HOST_ARCH

# Programs that were compiled faster are not worth a file.
_KEPT_SECONDS = 0.5


def open_device(
    info: DeviceInfo, capabilities: Capabilities, num_host_devices: int = 1
) -> TpuDevice:
    """The device ``info`` of this process's runtime; where its details name several ranks, as many
    devices, from this one on.

    ``num_host_devices``: as which a host's processor poses, if it was not used before.

    Raises:
        PluginError: jax does not see them.
    """
    keep_programs()
    kind = "cpu" if info.arch == HOST_ARCH else "tpu"
    if kind == "cpu" and num_host_devices > 1:
        with contextlib.suppress(RuntimeError):  # it was used before
            jax.config.update("jax_num_cpu_devices", num_host_devices)
    end = info.index + int(info.details.get("num_ranks", "1"))
    try:
        devices = jax.devices(kind)
    except RuntimeError as error:
        raise PluginError(f"jax finds no device of kind {kind}: {error}") from error
    if end > len(devices):
        raise PluginError(f"jax has {len(devices)} devices of kind {kind}, not {end}")
    return TpuDevice(info, capabilities, devices[info.index : end])


def keep_programs() -> None:
    """Have compiled programs kept in the user's cache, unless jax was told where already."""
    if jax.config.jax_compilation_cache_dir is None:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        jax.config.update("jax_compilation_cache_dir", str(Path(home) / "cardan" / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", _KEPT_SECONDS)
