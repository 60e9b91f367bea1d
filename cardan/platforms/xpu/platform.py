"""The platform for Intel's GPUs. Importing and probing start no runtime; imports no torch."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from cardan.core.interfaces.capabilities import Capabilities, DeviceInfo
from cardan.core.interfaces.constraints import Constraint
from cardan.core.interfaces.device import Device
from cardan.core.interfaces.graphs import ShapePolicy
from cardan.core.interfaces.kernels import Provider
from cardan.core.interfaces.platform import ConfigView, Platform, Probe, Role
from cardan.core.interfaces.roofline import Roofline
from cardan.platforms.shared.triton.cache_dtypes import cache_dtypes
from cardan.platforms.xpu.families import Family, family_of, features, num_tiles
from cardan.platforms.xpu.providers import providers
from cardan.platforms.xpu.roofline import gpu_roofline, known_gpus, sheet_of
from cardan.platforms.xpu.sysfs import (
    Card,
    finder,
    host_memory,
    intel_cards,
    may_open,
    render_path,
    visible,
)

if TYPE_CHECKING:
    from cardan.core.interfaces.attention import AttentionBackend
    from cardan.core.types.model import ModelSummary

_SCORE = 90
# Below cards: a host may have both.
_INTEGRATED_SCORE = 20
_EXTRA = "pip install 'cardan[xpu]'"
_TORCH = "install torch's build for XPU from the index that docs/xpu.md names"
_LOADER = "libze_loader.so.1"
_GPU_DRIVER = "libze_intel_gpu.so.1"
_GIB = 1 << 30
# Whose versions are told; the last two are optional.
_PACKAGES = (
    "torch",
    "pytorch-triton-xpu",
    "triton-xpu",
    "vllm-xpu-kernels",
    "intel-extension-for-pytorch",
)
_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
# Emulate float64 where instructions for it are missing: the runtime's, and the compiler's switch.
_EMULATE_FP64 = {"OverrideDefaultFP64Settings": "1", "IGC_EnableDPEmulation": "1"}


@dataclass(frozen=True, slots=True)
class _Found:
    """One device: a card, or the tile of one."""

    card: Card
    family: Family
    tile: int


class XpuPlatform(Platform):
    """The GPUs that ``ZE_AFFINITY_MASK`` leaves: cards, or integrated GPUs where there are no
    cards, as torch has it."""

    name = "xpu"
    contract = (1, 0)

    def __init__(
        self,
        root: Path = Path("/"),
        environment: Mapping[str, str] = os.environ,
        torch_folder: Callable[[], Path | None] | None = None,
        has_library: Callable[[str], bool] | None = None,
    ) -> None:
        """``root`` is where the machine's files are; ``torch_folder`` finds torch without importing
        it; ``has_library`` says whether programs would find a library."""
        self._root = root
        self._environment = environment
        self._torch_folder = torch_folder or _torch_folder
        folders = [*environment.get("LD_LIBRARY_PATH", "").split(":"), f"{sys.prefix}/lib"]
        self._has_library = has_library or finder(root, [item for item in folders if item])

    def probe(self) -> Probe:
        cards = intel_cards(self._root)
        if not cards:
            return Probe.absent("there is no Intel GPU under /sys/class/drm")
        found = self._found()
        if not found:
            return Probe.absent(self._why_none(cards))
        given = [item for item in found if self._render_path(item).exists()]
        if not given:
            nodes = ", ".join(sorted({self._node(item) for item in found}))
            return Probe.absent(f"{_names(found)}: this process is not given {nodes}")
        closed = [item for item in given if not may_open(self._render_path(item))]
        if closed:
            return Probe.broken(
                f"{_names(closed)}: this user may not open {self._node(closed[0])}",
                "add the user to the group that owns it (sudo usermod -aG render $USER) and log in "
                "again; give a container that group, too (--group-add)",
            )
        return self._with_torch(given)

    def devices(self) -> Sequence[DeviceInfo]:
        return tuple(
            self._info(index, item)
            for index, item in enumerate(self._found())
            if self._render_path(item).exists()
        )

    def open(self, device: DeviceInfo) -> Device:
        from cardan.platforms.xpu.device import open_device

        return open_device(device, self.capabilities(device), lambda: host_memory(self._root))

    def capabilities(self, device: DeviceInfo) -> Capabilities:
        has_fp64 = device.details.get("float64") != "emulated"
        return Capabilities(
            dtypes=("bfloat16", "float16", "float32"),
            float64=has_fp64,
            kv_dtypes=cache_dtypes(device.arch),
            instruction_sets=(
                device.arch,
                *features(device.arch),
                *(("fp64",) if has_fp64 else ()),
            ),
            graphs="full" if self._has_graphs() else "none",
            async_depth=1,
            streams=True,
            pinned_host_memory=True,
            unified_memory=device.details.get("memory") == "shared with the host",
        )

    def constrain(self, config: ConfigView, device: DeviceInfo) -> Sequence[Constraint]:
        is_shared = device.details.get("memory") == "shared with the host"
        share = (0.5, "the host uses the same memory") if is_shared else (0.9, "a tenth is reserve")
        return (
            Constraint("cache.block_size", "==", 16, "small blocks waste little memory", "prefer"),
            Constraint("cache.memory_utilization", "==", *share, "prefer"),
            Constraint(
                "scheduler.max_num_seqs",
                "==",
                32 if is_shared else 256,
                "weights are read once for all rows of a step",
                "prefer",
            ),
        )

    def child_env(self, role: Role, devices: Sequence[DeviceInfo]) -> Mapping[str, str]:
        """The driver then counts devices as this platform does, tells how much memory is free, and
        emulates float64 where a device lacks it."""
        if role == "server" or not devices:
            return {}
        wanted = {"ZE_ENABLE_PCI_ID_DEVICE_ORDER": "1", "ZES_ENABLE_SYSMAN": "1"}
        if any(device.details.get("float64") == "emulated" for device in devices):
            wanted |= _EMULATE_FP64
        return {name: value for name, value in wanted.items() if name not in self._environment}

    def shapes(self, model: "ModelSummary", device: DeviceInfo) -> ShapePolicy:
        if not self._has_graphs():
            return ShapePolicy()
        return ShapePolicy(token_buckets=_BUCKETS, sequence_buckets=_BUCKETS)

    def kernels(self, device: DeviceInfo) -> Sequence[Provider]:
        emulates = self._environment.get("IGC_EnableDPEmulation") == "1"
        return providers(device.details.get("float64") != "emulated" or emulates)

    def attention(self, device: DeviceInfo) -> "Sequence[type[AttentionBackend]]":
        if find_spec("triton") is None:
            return ()
        from cardan.platforms.shared.triton.attention import TritonAttention

        return (TritonAttention,)

    def doctor(self, device: DeviceInfo) -> Mapping[str, str]:
        facts = {name: _version(name) for name in _PACKAGES}
        if device.details.get("memory") == "shared with the host":
            facts["free memory"] = "an estimate: integrated GPUs may refuse to tell it"
        if not self._has_graphs():
            facts["graphs"] = "none: this torch has no torch.xpu.XPUGraph"
        return {**facts, **device.details}

    def roofline(self, device: DeviceInfo, measure: bool = False) -> Roofline | None:
        return gpu_roofline(device)

    def known_devices(self) -> Sequence[DeviceInfo]:
        return known_gpus(self.name)

    @property
    def _joins_tiles(self) -> bool:
        return self._environment.get("ZE_FLAT_DEVICE_HIERARCHY", "").upper() == "COMPOSITE"

    def _found(self) -> tuple[_Found, ...]:
        """Devices that are visible and served; if there are cards, no integrated GPU."""
        counted = [
            (card, tile)
            for card in intel_cards(self._root)
            for tile in range(1 if self._joins_tiles else num_tiles(card.device_id))
        ]
        mask = self._environment.get("ZE_AFFINITY_MASK")
        found = []
        for card, tile in visible(counted, mask, self._joins_tiles):
            family = family_of(card.device_id)
            if family is not None:
                found.append(_Found(card, family, tile))
        cards = tuple(item for item in found if not item.family.is_integrated)
        return cards or tuple(found)

    def _why_none(self, cards: Sequence[Card]) -> str:
        served = [card for card in cards if family_of(card.device_id) is not None]
        if not served:
            ids = ", ".join(f"{card.device_id:#06x}" for card in cards)
            return f"torch's builds for XPU serve none of the Intel GPUs here (PCI device {ids})"
        mask = self._environment.get("ZE_AFFINITY_MASK", "")
        return f"ZE_AFFINITY_MASK={mask!r} hides all of the {len(served)} Intel GPUs"

    def _with_torch(self, found: Sequence[_Found]) -> Probe:
        problem = self._problem()
        is_integrated = all(item.family.is_integrated for item in found)
        if problem is None:
            score = _INTEGRATED_SCORE if is_integrated else _SCORE
            return Probe.present(score, _names(found))
        reason, fix = problem
        if is_integrated:
            # Nearly every laptop has one; who did not prepare it does not mean to use it.
            return Probe.absent(f"{_names(found)} is not set up: {reason}; {fix}")
        return Probe.broken(reason, fix)

    def _problem(self) -> tuple[str, str] | None:
        """What is missing of the software, and the remedy."""
        folder = self._torch_folder()
        if folder is None:
            return "torch is not installed", f"{_TORCH}, then {_EXTRA}"
        if not (folder / "lib" / "libtorch_xpu.so").exists():
            return f"torch {_version('torch')} is a build without XPU", _TORCH
        for library, what, package in (
            (_LOADER, "Level Zero's loader", "libze1 (or level-zero)"),
            (_GPU_DRIVER, "Intel's compute runtime", "libze-intel-gpu1 (or intel-compute-runtime)"),
        ):
            if not self._has_library(library):
                return (
                    f"{what} ({library}) is not installed",
                    f"install the distribution's package {package}",
                )
        return None

    def _has_graphs(self) -> bool:
        folder = self._torch_folder()
        return folder is not None and (folder / "xpu" / "graphs.py").exists()

    def _render_path(self, item: _Found) -> Path:
        """That of a card for which the kernel made none is one that does not exist."""
        return render_path(self._root, item.card) if item.card.render_node else Path("/dev/null/0")

    def _node(self, item: _Found) -> str:
        return f"/dev/dri/{item.card.render_node or 'renderD*'}"

    def _info(self, index: int, item: _Found) -> DeviceInfo:
        card, family = item.card, item.family
        details = {
            "address": card.address,
            "device_id": f"{card.device_id:#06x}",
            "family": family.title,
            "driver": card.driver,
            "node": self._node(item),
        }
        if family.lacks_fp64:
            details["float64"] = "emulated"
        name, memory = _name_and_memory(item, self._joins_tiles)
        if family.is_integrated:
            details["memory"] = "shared with the host"
            host = host_memory(self._root)
            memory = host[0] if host is not None else None
        elif num_tiles(card.device_id) > 1 and not self._joins_tiles:
            details["tile"] = str(item.tile)
        return DeviceInfo(
            platform=self.name,
            index=index,
            name=name,
            arch=family.arch,
            memory_bytes=memory,
            details=details,
        )


def _name_and_memory(item: _Found, joins_tiles: bool) -> tuple[str, int | None]:
    """As on the data sheet; of other GPUs the driver tells the memory when they are opened."""
    sheet = sheet_of(item.card.device_id)
    if sheet is None:
        return f"Intel {item.family.title} {item.card.device_id:#06x}", None
    if not joins_tiles or num_tiles(item.card.device_id) == 1:
        return sheet.name, sheet.memory_gib * _GIB
    whole = sheet.name.partition(",")[0]
    return whole, sheet.memory_gib * num_tiles(item.card.device_id) * _GIB


def _names(found: Sequence[_Found]) -> str:
    return ", ".join(f"{_name_and_memory(item, False)[0]} ({item.family.arch})" for item in found)


def _torch_folder() -> Path | None:
    try:
        spec = find_spec("torch")
    except (ImportError, ValueError):
        return None
    places = spec.submodule_search_locations if spec is not None else None
    return Path(places[0]) if places else None


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"
