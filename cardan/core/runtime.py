"""The owner of opened devices. There is no global current platform."""

import logging
from typing import Self

from cardan.core.discovery import describe
from cardan.core.interfaces.capabilities import DeviceInfo
from cardan.core.interfaces.device import Device
from cardan.core.interfaces.errors import CardanError, ConfigError, PluginError
from cardan.core.interfaces.platform import Platform

logger = logging.getLogger(__name__)


class Runtime:
    """Opens devices and closes them again; a context manager.

    Devices of several platforms may be open at once as long as no two platforms claim the same
    exclusive resource of the process. A device is open at most once in a runtime.
    """

    def __init__(self) -> None:
        self._devices: dict[tuple[str, int], Device] = {}
        # Claimed resource -> name of the platform that holds it.
        self._claims: dict[str, str] = {}
        self._is_closed = False

    @property
    def devices(self) -> tuple[Device, ...]:
        """Open devices in the order in which they were opened."""
        return tuple(self._devices.values())

    def open(self, platform: Platform, info: DeviceInfo) -> Device:
        """Open a device; the runtime closes it.

        Raises:
            ConfigError: the runtime is closed, the device is open already, or another open
                platform claims the same resource.
            PluginError: the platform failed to open it.
        """
        self._check_open(platform, info)
        try:
            device = platform.open(info)
        except CardanError:
            raise
        except Exception as error:
            raise PluginError(
                f"platform {platform.name} cannot open device {info.index} ({info.name}): "
                f"{describe(error)}; see `cardan doctor`"
            ) from error
        self._devices[platform.name, info.index] = device
        self._claims.update(dict.fromkeys(platform.claims, platform.name))
        return device

    def close_device(self, device: Device) -> None:
        """Close one device; its platform's claims end with its last device."""
        key = next((key for key, item in self._devices.items() if item is device), None)
        if key is None:
            raise ConfigError("this runtime has not opened that device, or closed it already")
        del self._devices[key]
        if all(name != key[0] for name, _ in self._devices):
            self._claims = {
                claim: owner for claim, owner in self._claims.items() if owner != key[0]
            }
        device.close()

    def close(self) -> None:
        """Close all devices, the newest first; one that fails does not keep the rest open."""
        self._is_closed = True
        while self._devices:
            (name, index), device = self._devices.popitem()
            try:
                device.close()
            except Exception as error:
                logger.warning(
                    "device %d of platform %s failed to close: %s", index, name, describe(error)
                )
        self._claims.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _check_open(self, platform: Platform, info: DeviceInfo) -> None:
        if self._is_closed:
            raise ConfigError("the runtime is closed; make a new one to open devices")
        if info.platform != platform.name:
            raise PluginError(
                f"device {info.index} says it belongs to {info.platform}, "
                f"platform {platform.name} was asked to open it"
            )
        if (platform.name, info.index) in self._devices:
            raise ConfigError(f"device {info.index} of platform {platform.name} is open already")
        for claim in sorted(platform.claims):
            owner = self._claims.get(claim, platform.name)
            if owner != platform.name:
                raise ConfigError(
                    f"platforms {owner} and {platform.name} both claim {claim}, so only one of "
                    "them can be open in a process; run the other one in a process of its own"
                )
