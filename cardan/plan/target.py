"""The device that is planned for: one of those here, or one that a platform knows by name."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cardan.core.interfaces.capabilities import Capabilities, DeviceInfo
from cardan.core.interfaces.errors import ConfigError, PluginError
from cardan.core.interfaces.kernels import check_needs
from cardan.core.interfaces.platform import Platform
from cardan.core.interfaces.roofline import Roofline
from cardan.core.platform_selection import (
    PlatformCandidate,
    PlatformReport,
    parse_platform_spec,
    probe_platforms,
    probe_table,
)

# Detail of a device whose memory and rates all ranks share.
_SHARED = "share"


@dataclass(frozen=True, slots=True)
class Target:
    """A device, what its platform says of it, and what is to be said about the choice.

    ``devices`` are all that could be used; of a device that is not here there may be any number.
    """

    platform: Platform
    devices: tuple[DeviceInfo, ...]
    capabilities: Capabilities
    roofline: Roofline | None
    is_here: bool
    notes: tuple[str, ...] = ()

    @property
    def info(self) -> DeviceInfo:
        return self.devices[0]

    @property
    def is_shared_by_ranks(self) -> bool:
        return self.info.details.get("ranks") == _SHARED

    def has_kernel(self, op: str, form: str, columns: int, rows: int, dtype: str) -> bool:
        """Whether a provider of ``op`` states that it takes weights in this form."""
        attributes: dict[str, int | float | str | bool] = {
            "dtype": dtype,
            "format": form,
            "in_features": columns,
            "out_features": rows,
            "hidden": columns,
        }
        for provider in self.platform.kernels(self.info):
            # A machine that has the device has the modules.
            needs = replace(provider.needs, modules=())
            if provider.op == op and check_needs(
                needs, self.capabilities.instruction_sets, attributes
            ):
                return True
        return False

    def copies_head(self, columns: int, rows: int, dtype: str) -> bool:
        """Whether the kernel of dense layers brings weights into a form of its own."""
        attributes: dict[str, int | float | str | bool] = {
            "dtype": dtype,
            "in_features": columns,
            "out_features": rows,
        }
        for provider in self.platform.kernels(self.info):
            needs = replace(provider.needs, modules=())
            features = self.capabilities.instruction_sets
            if provider.op == "linear" and check_needs(needs, features, attributes):
                return bool(provider.prepare)
        return False


def choose_target(
    spec: str | None,
    device: str | None,
    candidates: Sequence[PlatformCandidate],
    measure: bool,
) -> Target:
    """The device of the platform ``spec`` (``NAME`` or ``NAME:INDEX``; None: the best one present),
    or the known one called ``device``.

    A broken platform whose devices can be listed all the same will do for planning.

    Raises:
        ConfigError: there is no such device.
        PluginError: there is no such platform, or none that has a device.
    """
    name, indices = parse_platform_spec(spec) if spec is not None else (None, ())
    wanted = [item for item in candidates if name in (None, item.name)]
    if not wanted:
        known = ", ".join(item.name for item in candidates) or "none"
        raise PluginError(f"no platform named {name!r} (installed: {known})")
    reports = probe_platforms(wanted)
    if device is not None:
        return _named_target(device, reports)
    return _present_target(reports, indices, measure)


def known_names(reports: Sequence[PlatformReport]) -> tuple[str, ...]:
    """Devices that platforms know by name."""
    return tuple(
        info.name
        for item in reports
        if item.platform is not None
        for info in item.platform.known_devices()
    )


def known_target(platform: Platform, info: DeviceInfo) -> Target:
    """A device that a platform knows and that is not here, in any number."""
    notes = ("the device is not here: its figures are those of its data sheet",)
    return _target(platform, (info,), False, is_here=False, notes=notes)


def _named_target(device: str, reports: Sequence[PlatformReport]) -> Target:
    known = [
        (item.platform, info)
        for item in reports
        if item.platform is not None
        for info in item.platform.known_devices()
    ]
    if not known:
        names = ", ".join(item.name for item in reports)
        raise ConfigError(
            f"--device {device!r}: platform {names} knows no devices by name; leave out --device, "
            "or name another platform"
        )
    # The whole name, the name without its first word (the vendor), or a part of it.
    wanted = device.casefold()
    ways = (
        [pair for pair in known if pair[1].name.casefold() == wanted],
        [pair for pair in known if pair[1].name.casefold().partition(" ")[2] == wanted],
        [pair for pair in known if wanted in pair[1].name.casefold()],
    )
    found = next((pairs for pairs in ways if pairs), [])
    if len(found) != 1:
        names = ", ".join(info.name for _, info in found or known)
        what = "may be any of" if found else "is not known; these are"
        raise ConfigError(f"--device {device!r} {what}: {names}")
    return known_target(*found[0])


def _present_target(
    reports: Sequence[PlatformReport], indices: Sequence[int], measure: bool
) -> Target:
    present = sorted(
        (item for item in reports if item.probe.state == "present"),
        key=lambda item: (-item.probe.score, item.name),
    )
    broken = [item for item in reports if item.probe.state == "broken"]
    notes = tuple(
        f"platform {item.name} is broken here: {item.probe.reason}"
        + (f" (fix: {item.probe.fix})" if item.probe.fix else "")
        for item in broken
    )
    for item in present:
        if item.platform is not None:
            return _of_platform(item.platform, item.devices, indices, measure, notes)
    for item in broken:
        devices = _listed(item.platform)
        if item.platform is not None and devices:
            return _of_platform(item.platform, devices, indices, measure, notes)
    names = ", ".join(known_names(reports))
    remedy = f"\nTo plan for a device that is not here name it with --device: {names}"
    raise PluginError(f"no device is found:\n{probe_table(reports)}{remedy if names else ''}")


def _listed(platform: Platform | None) -> tuple[DeviceInfo, ...]:
    """Devices of a broken platform, if it can list them all the same."""
    try:
        return () if platform is None else tuple(platform.devices())
    except Exception:  # it is broken, in whatever way
        return ()


def _of_platform(
    platform: Platform,
    devices: Sequence[DeviceInfo],
    indices: Sequence[int],
    measure: bool,
    notes: tuple[str, ...],
) -> Target:
    chosen = tuple(info for info in devices if not indices or info.index in indices)
    if len(chosen) < max(1, len(indices)):
        listed = ", ".join(str(info.index) for info in devices)
        raise ConfigError(
            f"device.platform asks for devices of {platform.name} that are not there; there are: "
            f"{listed}"
        )
    return _target(platform, chosen, measure, is_here=True, notes=notes)


def _target(
    platform: Platform,
    devices: tuple[DeviceInfo, ...],
    measure: bool,
    is_here: bool,
    notes: tuple[str, ...],
) -> Target:
    info = devices[0]
    roofline = platform.roofline(info, measure)
    return Target(platform, devices, platform.capabilities(info), roofline, is_here, notes)
