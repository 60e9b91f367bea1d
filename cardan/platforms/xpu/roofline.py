"""Peaks of Intel's GPUs, from their public data sheets; imports no torch.

Nobody has measured here which share of them steps reach.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cardan.core.interfaces.capabilities import DeviceInfo
from cardan.core.interfaces.roofline import Roofline

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Sheet:
    """One GPU, or one tile of it: GB/s, and TFLOP/s of 16-bit products and of float32 vectors.

    Where the sheet has only TOPS of int8 products, 16-bit ones are half of them.
    """

    name: str
    arch: str
    memory_gib: int
    gbytes_per_s: float
    half_tflops: float
    single_tflops: float


_MAX_1550 = Sheet("Data Center GPU Max 1550, one tile", "xe_hpc", 64, 1638, 416, 26.2)
_MAX_1100 = Sheet("Data Center GPU Max 1100", "xe_hpc", 48, 1229, 352, 22.2)
# By PCI device id.
_SHEETS = {
    0x0BD5: _MAX_1550,
    0x0BD6: _MAX_1550,
    0x0BDA: _MAX_1100,
    0x0BDB: _MAX_1100,
    0xE20B: Sheet("Arc B580", "xe2_hpg", 12, 456, 116.5, 13.7),
    0xE20C: Sheet("Arc B570", "xe2_hpg", 10, 380, 101.5, 11.5),
    0xE211: Sheet("Arc Pro B60", "xe2_hpg", 24, 456, 98.5, 12.3),
    0xE212: Sheet("Arc Pro B50", "xe2_hpg", 16, 224, 85, 10.7),
    0x56A1: Sheet("Arc A750", "xe_hpg", 8, 512, 114.5, 14.7),
    0x56A2: Sheet("Arc A580", "xe_hpg", 8, 512, 98.5, 12.3),
    0x56A5: Sheet("Arc A380", "xe_hpg", 6, 186, 33, 4.2),
    # There is one of 8 GiB, too: the driver tells when it is opened.
    0x56A0: Sheet("Arc A770", "xe_hpg", 16, 560, 131, 17.2),
}
_BY_NAME = {sheet.name: sheet for sheet in _SHEETS.values()}


def sheet_of(device_id: int) -> Sheet | None:
    return _SHEETS.get(device_id)


def known_gpus(platform: str) -> Sequence[DeviceInfo]:
    """All GPUs whose data sheets are known, as devices of ``platform``."""
    return tuple(
        DeviceInfo(
            platform=platform,
            index=0,
            name=sheet.name,
            arch=sheet.arch,
            memory_bytes=sheet.memory_gib * _GIB,
        )
        for sheet in _BY_NAME.values()
    )


def gpu_roofline(device: DeviceInfo) -> Roofline | None:
    """Peaks of a GPU by its name; None where its data sheet is not known."""
    sheet = _BY_NAME.get(device.name)
    if sheet is None:
        return None
    half = sheet.half_tflops * 1e12
    return Roofline(
        bytes_per_s=sheet.gbytes_per_s * 1e9,
        flop_per_s={"bfloat16": half, "float16": half, "float32": sheet.single_tflops * 1e12},
        source=f"Intel's data sheet of {device.name}",
    )
