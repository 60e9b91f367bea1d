"""What ``cardan doctor`` finds out, as plain data."""

import os
import platform as host_platform
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from cardan.cli.device_diagnosis import DeviceDiagnosis, diagnose_device
from cardan.cli.platforms import platform_fields
from cardan.cli.version import cardan_version
from cardan.core.config.plugins import PluginConfig
from cardan.core.discovery import Discovery
from cardan.core.interfaces.errors import CardanError
from cardan.core.interfaces.version import contract_name
from cardan.core.platform_selection import (
    PlatformReport,
    Selection,
    installed_platforms,
    probe_platforms,
    select_best,
    select_platform,
)

if TYPE_CHECKING:
    from cardan.core.plugin_manager import PluginManager

# Packages whose versions matter when something goes wrong.
PACKAGES: tuple[str, ...] = (
    "torch",
    "numpy",
    "tokenizers",
    "safetensors",
    "gguf",
    "transformers",
    "huggingface_hub",
    "msgspec",
    "pluggy",
    "fastapi",
    "uvicorn",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Everything. ``platform`` is None, and ``error`` says why, when nothing is usable."""

    versions: dict[str, str]
    host: dict[str, str]
    platforms: list[dict[str, Any]]
    duplicates: list[str]
    platform: str | None
    reason: str
    error: str
    devices: list[DeviceDiagnosis] = field(default_factory=list)
    plugins: list[dict[str, Any]] = field(default_factory=list)
    plugin_problem: str = ""

    @property
    def is_usable(self) -> bool:
        """Whether a platform was chosen and one of its devices could be opened."""
        return any(device.opened for device in self.devices)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "usable": self.is_usable}


def diagnose(wanted: str | None, plugins: PluginConfig) -> Diagnosis:
    """Probe all platforms (or only the one that ``wanted`` names) and look at the chosen one.

    Never raises for what it examines: that is what it reports.
    """
    discovery = Discovery()
    report, selection, error = _select(wanted, discovery)
    manager, plugin_problem = _load_plugins(plugins, discovery)
    devices = []
    if selection is not None:
        name = selection.platform.name
        ops = manager.ops() if manager is not None else ()
        wishes = manager.constraints if manager is not None else lambda config: ()
        devices = [
            diagnose_device(
                selection.platform,
                device,
                ops,
                manager.kernels(name, device) if manager is not None else (),
                wishes,
            )
            for device in selection.devices
        ]
    return Diagnosis(
        versions=collect_versions(),
        host=collect_host(),
        platforms=[platform_fields(item) for item in report],
        duplicates=[str(duplicate) for duplicate in discovery.duplicates()],
        platform=None if selection is None else selection.platform.name,
        reason="" if selection is None else selection.reason,
        error=error,
        devices=devices,
        plugins=[] if manager is None else [asdict(status) for status in manager.plugins()],
        plugin_problem=plugin_problem,
    )


def collect_versions() -> dict[str, str]:
    """Versions of cardan, its contract, Python, and packages that matter; none is imported."""
    versions = {
        "cardan": cardan_version(),
        "contract": contract_name(),
        "python": host_platform.python_version(),
    }
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def collect_host() -> dict[str, str]:
    """Facts about this machine and this process."""
    facts = {
        "system": f"{host_platform.system()} {host_platform.release()}",
        "machine": host_platform.machine(),
        "cpus": str(os.cpu_count() or 0),
    }
    if hasattr(os, "sched_getaffinity"):
        facts["cpus usable here"] = str(len(os.sched_getaffinity(0)))
    try:
        pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return facts
    return {**facts, "memory": format_bytes(pages * size)}


def format_bytes(count: int | None) -> str:
    """``12.3 GiB``; "unknown" for None."""
    if count is None:
        return "unknown"
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def _select(
    wanted: str | None, discovery: Discovery
) -> tuple[tuple[PlatformReport, ...], Selection | None, str]:
    candidates = installed_platforms(discovery)
    try:
        if wanted is not None:
            selection = select_platform(wanted, candidates)
            return selection.report, selection, ""
        report = probe_platforms(candidates)
    except CardanError as error:
        return (), None, str(error)
    try:
        return report, select_best(report), ""
    except CardanError as error:
        return report, None, str(error)


def _load_plugins(config: PluginConfig, discovery: Discovery) -> tuple["PluginManager | None", str]:
    # Only here: the hook specifications need NumPy, which costs every other command its import.
    from cardan.core.plugin_manager import PluginManager

    try:
        return PluginManager(config, discovery), ""
    except CardanError as error:
        return None, str(error)
