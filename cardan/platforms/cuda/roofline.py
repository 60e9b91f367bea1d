"""Peaks of NVIDIA's GPUs, from their public data sheets; imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from cardan.core.interfaces.capabilities import DeviceInfo
from cardan.core.interfaces.roofline import Efficiency, Roofline

_MIB = 1 << 20
_VENDOR = "NVIDIA "
# Beside what the driver counts as total: what it keeps, CUDA's context, torch's and cuBLAS's own.
# Seen on an H200.
_RESERVED = 1440 * _MIB
# Fitted to thirteen rows of benchmarks/gpu.py: decode steps at batch 1, 64 and 256 of three models,
# and of two of them 16 contexts of 16,384 tokens and prefills of 8192.
_EFFICIENCY = Efficiency(
    weights=0.87,
    cache=0.80,
    products={"bfloat16": 0.67, "float16": 0.67, "float32": 0.67},
    attention=0.42,
    layer_s=18e-6,
    source="benchmarks/gpu.py on one H200, models of 0.6 to 30 billion parameters in bfloat16",
)


@dataclass(frozen=True, slots=True)
class _Sheet:
    """One GPU: ``memory_mib`` as the driver shows it, GB/s, and TFLOP/s without sparsity of 16-bit
    products summed in float32, and of float32 outside tensor cores."""

    arch: str
    memory_mib: int
    gbytes_per_s: float
    half_tflops: float
    single_tflops: float


# By the driver's name, without the vendor's.
_SHEETS = {
    "B200": _Sheet("sm_100", 183359, 8000, 2250, 75),
    "H200": _Sheet("sm_90", 143771, 4800, 989, 67),
    "H200 NVL": _Sheet("sm_90", 143771, 4800, 835, 60),
    "H100 80GB HBM3": _Sheet("sm_90", 81559, 3350, 989, 67),
    "H100 NVL": _Sheet("sm_90", 95830, 3900, 835, 60),
    "H100 PCIe": _Sheet("sm_90", 81559, 2000, 756, 51),
    "A100-SXM4-80GB": _Sheet("sm_80", 81920, 2039, 312, 19.5),
    "A100 80GB PCIe": _Sheet("sm_80", 81920, 1935, 312, 19.5),
    "A100-SXM4-40GB": _Sheet("sm_80", 40960, 1555, 312, 19.5),
    "A100-PCIE-40GB": _Sheet("sm_80", 40960, 1555, 312, 19.5),
    "A30": _Sheet("sm_80", 24576, 933, 165, 10.3),
    "A40": _Sheet("sm_86", 46068, 696, 149.7, 37.4),
    "A10": _Sheet("sm_86", 23028, 600, 125, 31.2),
    "L40S": _Sheet("sm_89", 46068, 864, 362, 91.6),
    "L40": _Sheet("sm_89", 46068, 864, 181, 90.5),
    "L4": _Sheet("sm_89", 23034, 300, 121, 30.3),
    "GeForce RTX 5090": _Sheet("sm_120", 32607, 1792, 209.5, 104.8),
    "GeForce RTX 4090": _Sheet("sm_89", 24564, 1008, 165.2, 82.6),
    "GeForce RTX 3090": _Sheet("sm_86", 24576, 936, 71, 35.6),
}


def known_gpus(platform: str) -> Sequence[DeviceInfo]:
    """All GPUs whose data sheets are known, as devices of ``platform``."""
    return tuple(
        DeviceInfo(
            platform=platform,
            index=0,
            name=f"{_VENDOR}{name}",
            arch=sheet.arch,
            memory_bytes=sheet.memory_mib * _MIB,
        )
        for name, sheet in _SHEETS.items()
    )


def gpu_roofline(device: DeviceInfo) -> Roofline | None:
    """Peaks of a GPU by its name; None where its data sheet is not known, or for a part of one."""
    sheet = _SHEETS.get(device.name.removeprefix(_VENDOR))
    if sheet is None:
        return None
    half = sheet.half_tflops * 1e12
    return Roofline(
        bytes_per_s=sheet.gbytes_per_s * 1e9,
        flop_per_s={"bfloat16": half, "float16": half, "float32": sheet.single_tflops * 1e12},
        source=f"data sheet of {device.name}",
        reserved_bytes=_RESERVED,
        efficiency=_EFFICIENCY,
    )
