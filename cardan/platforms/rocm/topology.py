"""What the kernel's driver says of AMD's GPUs, in sysfs; no runtime is started, no library loaded.

The tree is that of ``amdkfd``: ``class/kfd/kfd/topology/nodes/N`` is a processor or a GPU, in the
order in which ROCm's runtime counts them. Files of ``name value`` lines hold numbers.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from cardan.platforms.rocm.products import product_name

_VENDOR = 0x1002
_NODES = "class/kfd/kfd/topology/nodes"
_VERSION = "module/amdgpu/version"
# Banks of memory that are the GPU's own: what the host can see of it, and what it cannot.
_OWN_MEMORY = {1, 2}
# Devices that draw or compute: displays, and processing accelerators.
_CLASSES = ("0x03", "0x12")
_OVERRIDE = "HSA_OVERRIDE_GFX_VERSION"
# Where libdrm's table of names lies.
_NAMES = ("/usr/share/libdrm/amdgpu.ids", "/opt/amdgpu/share/libdrm/amdgpu.ids")


@dataclass(frozen=True, slots=True)
class Places:
    """Where the kernel's files are; tests have their own."""

    sysfs: Path = Path("/sys")
    devices: Path = Path("/dev")
    names: tuple[Path, ...] = tuple(map(Path, _NAMES))
    is_open: Callable[[Path], bool] = lambda path: os.access(path, os.R_OK | os.W_OK)


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One GPU.

    ``index`` counts the GPUs of the host in the kernel's order. ``arch`` is the compiler's name.
    ``memory_bytes`` is None where the kernel lists no memory of its own (it shares the host's).
    ``bus_id`` is its PCI address, ``render`` its file for computing, without the folder.
    """

    index: int
    name: str
    arch: str
    memory_bytes: int | None
    lanes: int
    lds_bytes: int
    num_units: int
    unique_id: str
    bus_id: str
    render: str


@dataclass(frozen=True, slots=True)
class DriverFacts:
    """``is_loaded``: the driver's compute part runs. ``num_on_bus``: GPUs of this vendor on the
    PCI bus, whoever drives them."""

    is_loaded: bool
    version: str
    num_on_bus: int
    gpus: tuple[GpuFacts, ...]


def driver_facts(places: Places, environment: Mapping[str, str]) -> DriverFacts:
    """Read them; files that are not there, or cannot be read, count as empty."""
    nodes = places.sysfs / _NODES
    gpus: list[GpuFacts] = []
    for node in _numbered(nodes):
        numbers = _numbers(node / "properties")
        if numbers.get("vendor_id") == _VENDOR and numbers.get("simd_count"):
            gpus.append(_gpu(len(gpus), node, numbers, places))
    override = environment.get(_OVERRIDE, "")
    if override:
        gpus = [_renamed(gpu, override) for gpu in gpus]
    return DriverFacts(
        is_loaded=nodes.is_dir(),
        version=_text(places.sysfs / _VERSION),
        num_on_bus=sum(1 for _ in _on_bus(places.sysfs)),
        gpus=tuple(gpus),
    )


def visible_gpus(gpus: Iterable[GpuFacts], environment: Mapping[str, str]) -> tuple[GpuFacts, ...]:
    """The GPUs that ROCm's runtime shows this process, in its order, by variables that it reads.

    ``ROCR_VISIBLE_DEVICES`` has numbers and unique names; ``HIP_VISIBLE_DEVICES``, or, where that
    is not set, ``CUDA_VISIBLE_DEVICES``, then has numbers among those. What follows an entry that
    names no GPU is ignored.
    """
    found = tuple(gpus)
    for names in (("ROCR_VISIBLE_DEVICES",), ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")):
        listed = next((environment[name] for name in names if name in environment), None)
        if listed is not None:
            found = _chosen(found, listed)
    return found


def _chosen(gpus: tuple[GpuFacts, ...], listed: str) -> tuple[GpuFacts, ...]:
    chosen: list[GpuFacts] = []
    for entry in map(str.strip, listed.split(",")):
        if entry.isdigit():
            named = [gpus[int(entry)]] if int(entry) < len(gpus) else []
        else:
            named = [
                gpu for gpu in gpus if gpu.unique_id and entry.lower() == gpu.unique_id.lower()
            ]
        if not named or named[0] in chosen:
            break
        chosen += named
    return tuple(chosen)


def _gpu(index: int, node: Path, numbers: Mapping[str, int], places: Places) -> GpuFacts:
    minor = numbers.get("drm_render_minor", 0)
    render = f"renderD{minor}" if minor else ""
    device = places.sysfs / "class/drm" / render / "device"
    unique = numbers.get("unique_id", 0)
    arch = _arch(numbers.get("gfx_target_version", 0))
    per_unit = numbers.get("simd_per_cu", 0) or 1
    return GpuFacts(
        index=index,
        name=_name(device if render else None, numbers.get("device_id", 0), places) or arch,
        arch=arch,
        memory_bytes=_memory(node) or None,
        lanes=numbers.get("wave_front_size", 0),
        lds_bytes=numbers.get("lds_size_in_kb", 0) << 10,
        num_units=numbers.get("simd_count", 0) // per_unit,
        unique_id=f"GPU-{unique:016x}" if unique else "",
        bus_id=_bus_id(numbers),
        render=render,
    )


def _arch(version: int) -> str:
    """90402 is gfx942 and 90010 gfx90a: two digits each of minor and stepping, hex in names."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def _renamed(gpu: GpuFacts, override: str) -> GpuFacts:
    """With the version that the runtime is told to believe, ``11.0.0``; what is none is ignored."""
    parts = override.split(".")
    if len(parts) != 3 or not all(part.isdigit() for part in parts):
        return gpu
    major, minor, stepping = map(int, parts)
    return replace(gpu, arch=_arch(major * 10000 + minor * 100 + stepping))


def _bus_id(numbers: Mapping[str, int]) -> str:
    place = numbers.get("location_id", 0)
    bus, device, function = place >> 8 & 0xFF, place >> 3 & 0x1F, place & 7
    return f"{numbers.get('domain', 0):04x}:{bus:02x}:{device:02x}.{function}"


def _memory(node: Path) -> int:
    banks = (_numbers(bank / "properties") for bank in _numbered(node / "mem_banks"))
    return sum(
        bank.get("size_in_bytes", 0) for bank in banks if bank.get("heap_type") in _OWN_MEMORY
    )


def _name(device: Path | None, device_id: int, places: Places) -> str:
    """That of a known product, else libdrm's for its device and revision, else the board's own."""
    revision = _hex(_text(device / "revision")) if device is not None else 0
    known = product_name(device_id, revision)
    if known:
        return known
    for table in places.names:
        for line in _text(table).splitlines():
            parts = [part.strip() for part in line.split(",", 2)]
            if len(parts) == 3 and (_hex(parts[0]), _hex(parts[1])) == (device_id, revision):
                return parts[2]
    return _text(device / "product_name") if device is not None else ""


def _on_bus(sysfs: Path) -> Iterable[Path]:
    for device in _listed(sysfs / "bus/pci/devices"):
        is_own = _hex(_text(device / "vendor")) == _VENDOR
        if is_own and _text(device / "class").startswith(_CLASSES):
            yield device


def _numbered(folder: Path) -> list[Path]:
    """Its entries whose names are numbers, in their order."""
    found = [path for path in _listed(folder) if path.name.isdigit()]
    return sorted(found, key=lambda path: int(path.name))


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _numbers(path: Path) -> dict[str, int]:
    found = {}
    for line in _text(path).splitlines():
        name, _, value = line.partition(" ")
        if value.strip().isdigit():
            found[name] = int(value)
    return found


def _text(path: Path) -> str:
    """Nodes that a container may not see give EPERM."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _hex(text: str) -> int:
    try:
        return int(text, 16)
    except ValueError:
        return -1
