"""AMD's products by name, with the peaks of their public data sheets; imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from cardan.core.interfaces.capabilities import DeviceInfo
from cardan.core.interfaces.roofline import Roofline

_GIB = 1 << 30
_VENDOR = "AMD "
# What the driver, HIP's context and torch's libraries keep. An assumption: none was measured.
_RESERVED = 1 << 30


@dataclass(frozen=True, slots=True)
class _Sheet:
    """One device as the runtime counts them (a MI250X is two): GiB, GB/s, and TFLOP/s without
    sparsity of 16-bit and of float32 matrix products. ``ids``: PCI device and revision; -1 is any
    revision."""

    arch: str
    memory_gib: int
    gbytes_per_s: float
    half_tflops: float
    single_tflops: float
    ids: tuple[tuple[int, int], ...]


_SHEETS = {
    "Instinct MI210": _Sheet("gfx90a", 64, 1638.4, 181.0, 45.3, ((0x740F, -1),)),
    "Instinct MI250X": _Sheet("gfx90a", 64, 1638.4, 191.5, 47.9, ((0x7408, -1), (0x740C, -1))),
    "Instinct MI300X": _Sheet("gfx942", 192, 5300, 1307.4, 163.4, ((0x74A1, -1), (0x74B5, -1))),
    "Instinct MI325X": _Sheet("gfx942", 256, 6000, 1307.4, 163.4, ((0x74A5, -1),)),
    "Instinct MI350X": _Sheet("gfx950", 288, 8000, 2309.6, 144.2, ((0x75A0, -1), (0x75B0, -1))),
    "Instinct MI355X": _Sheet("gfx950", 288, 8000, 2516.6, 157.3, ((0x75A3, -1), (0x75B3, -1))),
    "Radeon RX 7900 XTX": _Sheet("gfx1100", 24, 960, 122.8, 61.4, ((0x744C, 0xC8),)),
    "Radeon PRO W7900": _Sheet("gfx1100", 48, 864, 122.6, 61.3, ((0x7448, -1), (0x744A, -1))),
    "Radeon RX 9070 XT": _Sheet("gfx1201", 16, 640, 195.0, 48.7, ((0x7550, 0xC0),)),
    "Radeon AI PRO R9700": _Sheet("gfx1201", 32, 640, 191.0, 47.8, ((0x7551, 0xC0),)),
}


def product_name(device_id: int, revision: int) -> str:
    """The name of a product whose data sheet is known, or nothing."""
    for name, sheet in _SHEETS.items():
        if {(device_id, revision), (device_id, -1)} & set(sheet.ids):
            return _VENDOR + name
    return ""


def known_gpus(platform: str) -> Sequence[DeviceInfo]:
    """All GPUs whose data sheets are known, as devices of ``platform``."""
    return tuple(
        DeviceInfo(
            platform=platform,
            index=0,
            name=_VENDOR + name,
            arch=sheet.arch,
            memory_bytes=sheet.memory_gib * _GIB,
        )
        for name, sheet in _SHEETS.items()
    )


def gpu_roofline(device: DeviceInfo) -> Roofline | None:
    """Peaks of a GPU by its name; None where its data sheet is not known. Which share of them is
    reached nobody has measured."""
    sheet = _SHEETS.get(device.name.removeprefix(_VENDOR))
    if sheet is None:
        return None
    half = sheet.half_tflops * 1e12
    return Roofline(
        bytes_per_s=sheet.gbytes_per_s * 1e9,
        flop_per_s={"bfloat16": half, "float16": half, "float32": sheet.single_tflops * 1e12},
        source=f"AMD's data sheet of {device.name}",
        reserved_bytes=_RESERVED,
    )
