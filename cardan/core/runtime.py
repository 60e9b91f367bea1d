"""The owner of opened devices. There is no global current platform."""

import logging
from typing import Self

from cardan.core.claims import PROCESS_CLAIMS, ClaimLedger
from cardan.core.discovery import describe
from cardan.core.interfaces.capabilities import DeviceInfo
from cardan.core.interfaces.device import Device
from cardan.core.interfaces.errors import CardanError, ConfigError, PluginError
from cardan.core.interfaces.platform import Platform

logger = logging.getLogger(__name__)


class Runtime:
    """Opens devices and closes them again; a context manager.

    Devices of several platforms may be open at once as long as no two platforms claim the same
    exclusive resource of the process, in this runtime or in another one of it. A device is open at
    most once in a runtime.
    """

    def __init__(self, claims: ClaimLedger = PROCESS_CLAIMS) -> None:
        self._devices: dict[tuple[str, int], Device] = {}
        self._ledger = claims
        # What each open device's platform claimed for it.
        self._claims: dict[tuple[str, int], frozenset[str]] = {}
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
        claims = frozenset(platform.claims)
        self._ledger.take(platform.name, claims)
        try:
            device = platform.open(info)
        except BaseException as error:
            self._ledger.give_back(platform.name, claims)
            if isinstance(error, CardanError) or not isinstance(error, Exception):
                raise
            raise PluginError(
                f"platform {platform.name} cannot open device {info.index} ({info.name}): "
                f"{describe(error)}; see `cardan doctor`"
            ) from error
        self._devices[platform.name, info.index] = device
        self._claims[platform.name, info.index] = claims
        return device

    def close_device(self, device: Device) -> None:
        """Close one device; its platform's claims end with its last device."""
        key = next((key for key, item in self._devices.items() if item is device), None)
        if key is None:
            raise ConfigError("this runtime has not opened that device, or closed it already")
        del self._devices[key]
        try:
            device.close()
        finally:
            self._ledger.give_back(key[0], self._claims.pop(key))

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
            self._ledger.give_back(name, self._claims.pop((name, index)))

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
