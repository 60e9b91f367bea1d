"""Choosing the platform: by name, or the best of those present; never silently a lesser one."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cardan.core.discovery import (
    NOT_INSTALLED,
    PLATFORMS,
    Discovery,
    describe,
    unknown_platform,
)
from cardan.core.interfaces.capabilities import DeviceInfo
from cardan.core.interfaces.errors import CardanError, ConfigError, PluginError
from cardan.core.interfaces.platform import Platform, Probe


@dataclass(frozen=True, slots=True)
class PlatformCandidate:
    """A platform that could be asked. ``load`` imports it and may raise anything."""

    name: str
    load: Callable[[], Platform]
    distribution: str = ""
    version: str = ""


@dataclass(frozen=True, slots=True)
class PlatformReport:
    """What asking one platform brought. ``platform`` is None where it could not be loaded.

    ``seconds`` is what import, probe and listing of devices took.
    """

    name: str
    probe: Probe
    devices: tuple[DeviceInfo, ...] = ()
    platform: Platform | None = None
    distribution: str = ""
    version: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Selection:
    """The chosen platform, the devices to use, why, and all that was asked."""

    platform: Platform
    devices: tuple[DeviceInfo, ...]
    reason: str
    report: tuple[PlatformReport, ...]


def installed_platforms(discovery: Discovery) -> tuple[PlatformCandidate, ...]:
    """All platforms with an entry point, none of them imported."""
    candidates: dict[str, PlatformCandidate] = {}
    for entry in discovery.entries(PLATFORMS):

        def load(name: str = entry.name) -> Platform:
            return _instantiate(name, discovery.load(PLATFORMS, name))

        candidates[entry.name] = PlatformCandidate(
            entry.name, load, entry.distribution, entry.version
        )
    return tuple(candidates.values())


def probe_platform(candidate: PlatformCandidate) -> PlatformReport:
    """Import, probe and list devices; whatever goes wrong is reported as ``broken``."""
    start = time.perf_counter()
    platform: Platform | None = None
    devices: tuple[DeviceInfo, ...] = ()
    fix = f"upgrade or uninstall {candidate.distribution or candidate.name}"
    try:
        platform = candidate.load()
        probe = platform.probe()
        if not isinstance(probe, Probe):
            probe = Probe.broken(f"probe() returned {probe!r}, not a Probe", fix)
        elif probe.state == "present":
            devices = tuple(platform.devices())
            if not devices:
                probe = Probe.broken("probe() says present, devices() lists none", fix)
    except CardanError as error:  # states its own remedy
        probe = Probe.broken(str(error), fix if platform is not None else "")
    except (Exception, SystemExit) as error:
        probe = Probe.broken(describe(error), fix)
    return PlatformReport(
        name=candidate.name,
        probe=probe,
        devices=devices,
        platform=platform,
        distribution=candidate.distribution,
        version=candidate.version,
        seconds=time.perf_counter() - start,
    )


def probe_platforms(candidates: Sequence[PlatformCandidate]) -> tuple[PlatformReport, ...]:
    """Ask every platform; one that fails never stops the others."""
    return tuple(probe_platform(candidate) for candidate in candidates)


def select_platform(name: str | None, platforms: Sequence[PlatformCandidate]) -> Selection:
    """Choose a platform and its devices.

    ``name`` is ``platform`` or ``platform:0,1``; only that one is then imported. Without a name
    all are probed and the highest score wins, unless one of them is broken: that is for the user
    to decide.

    Raises:
        ConfigError: ``name`` is malformed, or asks for a device that is not there.
        PluginError: the platform is unknown, absent or broken, or none is usable.
    """
    if name is None:
        return select_best(probe_platforms(platforms))
    wanted, indices = parse_platform_spec(name)
    for candidate in platforms:
        if candidate.name == wanted:
            return _select_named(probe_platform(candidate), indices)
    known = tuple(candidate.name for candidate in platforms)
    raise PluginError(unknown_platform(wanted, known, bool(known)))


def select_best(report: Sequence[PlatformReport]) -> Selection:
    """The best of probed platforms, as ``select_platform`` without a name."""
    if not report:
        raise PluginError(NOT_INSTALLED)
    broken = [item for item in report if item.probe.state == "broken"]
    present = sorted(
        (item for item in report if item.probe.state == "present"),
        key=lambda item: (-item.probe.score, item.name),
    )
    if broken:
        raise PluginError(_broken_message(broken, present))
    if not present or present[0].platform is None:
        raise PluginError(f"no platform finds a device:\n{probe_table(report)}")
    best = present[0]
    others = ", ".join(f"{item.name} ({item.probe.score})" for item in present[1:])
    reason = f"best score ({best.probe.score})"
    reason += f", also present: {others}" if others else ", the only one present"
    return Selection(present[0].platform, best.devices, reason, tuple(report))


def parse_platform_spec(spec: str) -> tuple[str, tuple[int, ...]]:
    """``acme`` -> its name and no indices; ``acme:0,1`` -> its name and (0, 1)."""
    name, colon, listed = spec.partition(":")
    parts = listed.split(",") if colon else []
    indices = tuple(int(part) for part in parts if part.strip().isdecimal())
    if not name or len(indices) != len(parts) or len(set(indices)) != len(indices):
        raise ConfigError(
            f"device.platform {spec!r} is not NAME or NAME:INDEX,INDEX (for example {name}:0,1)"
        )
    return name, indices


def probe_table(report: Sequence[PlatformReport]) -> str:
    """All probes, a line each: name, state, reason, fix."""
    width = max((len(item.name) for item in report), default=0)
    lines = []
    for item in report:
        line = f"  {item.name:<{width}}  {item.probe.state:<7}  {item.probe.reason}"
        lines.append(line + (f" (fix: {item.probe.fix})" if item.probe.fix else ""))
    return "\n".join(lines)


def _select_named(item: PlatformReport, indices: tuple[int, ...]) -> Selection:
    if item.probe.state == "absent":
        raise PluginError(f"platform {item.name} finds no device: {item.probe.reason}")
    if item.probe.state == "broken" or item.platform is None:
        raise PluginError(_broken_message([item], []))
    devices = item.devices
    if indices:
        by_index = {device.index: device for device in item.devices}
        missing = [index for index in indices if index not in by_index]
        if missing:
            raise ConfigError(
                f"device.platform asks for {item.name} device {missing[0]}, "
                f"there are: {', '.join(map(str, sorted(by_index)))}"
            )
        devices = tuple(by_index[index] for index in indices)
    return Selection(item.platform, devices, "named by the user", (item,))


def _broken_message(broken: Sequence[PlatformReport], present: Sequence[PlatformReport]) -> str:
    lines = []
    for item in broken:
        fix = f"; fix: {item.probe.fix}" if item.probe.fix else ""
        lines.append(f"platform {item.name} is broken: {item.probe.reason}{fix}")
    if present:
        names = " or ".join(f"--platform {item.name}" for item in present)
        lines.append(f"To go on without it, name another one: {names}")
    return "\n".join(lines)


def _instantiate(name: str, loaded: object) -> Platform:
    if not (isinstance(loaded, type) and issubclass(loaded, Platform)):
        raise PluginError(
            f"platform {name} is not a subclass of cardan.core.interfaces.platform.Platform"
        )
    if getattr(loaded, "name", None) != name:
        raise PluginError(
            f"platform {name}: its class is named {getattr(loaded, 'name', None)!r}, "
            "the entry point and the class must agree"
        )
    missing = sorted(getattr(loaded, "__abstractmethods__", ()))
    if missing:
        raise PluginError(f"platform {name} does not implement {', '.join(missing)}")
    return loaded()
