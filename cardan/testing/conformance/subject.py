"""The platform under test: how it was named, where it comes from, and loading it."""

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter
from typing import Any

from cardan.core.discovery import PLATFORMS, Discovery, describe, unknown_platform
from cardan.core.interfaces.capabilities import DeviceInfo
from cardan.core.interfaces.platform import Platform


class SubjectError(Exception):
    """The named platform does not exist, or cannot be loaded; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A platform as it was named.

    ``module`` and ``attribute`` say where its class is. ``entry`` is the name of its entry point,
    empty for a ``MODULE:CLASS``. ``index`` is the device to test, None: the first.
    """

    spec: str
    module: str
    attribute: str
    entry: str = ""
    index: int | None = None
    distribution: str = ""
    version: str = ""

    @property
    def target(self) -> str:
        return f"{self.module}:{self.attribute}"

    def load_class(self) -> Any:
        """Import what the target names, whatever it is.

        Raises:
            SubjectError: that failed.
        """
        try:
            return attrgetter(self.attribute)(import_module(self.module))
        except (Exception, SystemExit) as error:
            raise SubjectError(f"{self.target} cannot be loaded: {describe(error)}") from error

    def load(self) -> Platform:
        """A new instance of the platform.

        Raises:
            SubjectError: the target cannot be loaded, is no platform or cannot be made.
        """
        loaded = self.load_class()
        if not (isinstance(loaded, type) and issubclass(loaded, Platform)):
            raise SubjectError(
                f"{self.target} is not a subclass of cardan.core.interfaces.platform.Platform"
            )
        try:
            return loaded()
        except Exception as error:
            raise SubjectError(f"{self.target}() failed: {describe(error)}") from error

    def device_info(self, platform: Platform) -> DeviceInfo:
        """The device to test, by its index.

        Raises:
            SubjectError: there is none.
        """
        devices = tuple(platform.devices())
        if not devices:
            raise SubjectError(f"platform {self.spec} lists no device")
        if self.index is None:
            return devices[0]
        for device in devices:
            if device.index == self.index:
                return device
        there = ", ".join(str(device.index) for device in devices)
        raise SubjectError(f"{self.spec}: no device {self.index}, there are: {there}")


def resolve_subject(spec: str, discovery: Discovery | None = None) -> Subject:
    """Find ``NAME``, ``NAME:INDEX``, ``MODULE:CLASS`` or ``MODULE:CLASS:INDEX``; imports nothing
    but the packages around a MODULE.

    Raises:
        SubjectError: no such platform; the message has the known names.
    """
    head, _, tail = spec.rpartition(":")
    index = int(tail) if head and tail.isdecimal() else None
    name = spec if index is None else head
    found = discovery or Discovery()
    if ":" in name:
        return _of_module(spec, name, index, found)
    for entry in found.entries(PLATFORMS):
        if entry.name == name:
            module, _, attribute = entry.target.partition(":")
            return Subject(
                spec=spec,
                module=module,
                attribute=attribute,
                entry=entry.name,
                index=index,
                distribution=entry.distribution,
                version=entry.version,
            )
    message = unknown_platform(name, found.names(PLATFORMS), found.is_complete())
    raise SubjectError(f"{message}; or name a class: MODULE:CLASS")


def _of_module(spec: str, target: str, index: int | None, discovery: Discovery) -> Subject:
    module, _, attribute = target.partition(":")
    if not module or not all(part.isidentifier() for part in attribute.split(".")):
        raise SubjectError(f"{spec!r} is neither NAME, NAME:INDEX nor MODULE:CLASS")
    try:
        is_there = find_spec(module) is not None
    except (ImportError, ValueError):
        is_there = False
    if not is_there:
        raise SubjectError(f"{spec!r}: there is no module {module}, is its package installed?")
    for entry in discovery.entries(PLATFORMS):
        if entry.target == target:
            return Subject(
                spec=spec,
                module=module,
                attribute=attribute,
                index=index,
                distribution=entry.distribution,
                version=entry.version,
            )
    return Subject(spec=spec, module=module, attribute=attribute, index=index)
