"""What an engine runs on: the platform, its devices, and the configuration solved for them.
Imports no torch."""

import logging
from dataclasses import dataclass, replace

from cardan.bootstrap.model_source import (
    ModelSource,
    check_kv_dtype,
    normal_dtype,
    normal_kv_dtype,
)
from cardan.bootstrap.ranks import rank_devices
from cardan.core.config.engine import EngineConfig
from cardan.core.constraint_solver import Resolved, owned_constraints, say_settings, solve
from cardan.core.discovery import Discovery
from cardan.core.interfaces.capabilities import Capabilities, DeviceInfo
from cardan.core.interfaces.errors import ConfigError
from cardan.core.interfaces.platform import Platform
from cardan.core.platform_selection import installed_platforms, select_platform
from cardan.core.plugin_manager import PluginManager

logger = logging.getLogger("cardan.engine")


@dataclass(frozen=True, slots=True)
class Chosen:
    """The platform, the device of each rank, and the configuration solved for them."""

    platform: Platform
    devices: tuple[DeviceInfo, ...]
    capabilities: Capabilities
    config: EngineConfig

    @property
    def info(self) -> DeviceInfo:
        return self.devices[0]


def choose(
    config: EngineConfig, discovery: Discovery, plugins: PluginManager, source: ModelSource
) -> Chosen:
    selection = select_platform(config.device.platform, installed_platforms(discovery))
    platform, info = selection.platform, selection.devices[0]
    capabilities = platform.capabilities(info)
    wishes = owned_constraints(platform.constrain(config, info), f"platform {platform.name}")
    resolved: Resolved = solve(config, (*wishes, *plugins.constraints(config)))
    for decision in resolved.decisions:
        logger.info("%s", decision)
    logger.info("settings: %s", say_settings(resolved.settings))
    config = resolved.config
    dtype = normal_dtype(config.model.dtype)
    if dtype == "auto":
        own = source.dtype
        dtype = own if own in capabilities.dtypes else capabilities.dtypes[0]
    if dtype not in capabilities.dtypes:
        raise ConfigError(
            f"model.dtype {dtype} is not available on {info.name}; "
            f"choose one of {', '.join(capabilities.dtypes)}"
        )
    config = config.with_value("model.dtype", dtype)
    kv_dtype = normal_kv_dtype(config.cache.kv_cache_dtype)
    check_kv_dtype(kv_dtype, capabilities.kv_dtypes, info.name)
    config = config.with_value("cache.kv_cache_dtype", kv_dtype)
    devices = selection.devices
    threads = config.device.num_threads
    if threads is not None:
        wanted = {"num_threads": str(threads)}
        devices = tuple(replace(item, details={**item.details, **wanted}) for item in devices)
    devices = rank_devices(platform.name, devices, config.parallel.tensor_parallel_size)
    plugins.notify("cardan_engine_starting", config=config, options=dict(config.plugins.options))
    return Chosen(platform, devices, capabilities, config)
