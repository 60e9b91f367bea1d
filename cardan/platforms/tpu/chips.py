"""TPUs as the machine's files show them, and what their data sheets say."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_GOOGLE = "0x1ae0"
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Chip:
    """What one of jax's devices is: a chip, or one of two cores of a tpu7x chip.

    ``arch`` is Google's name for the generation. From the tables of Google's documentation of the
    generations: memory in bytes, its GB/s, TFLOP/s of bfloat16 and TOP/s of int8 products.
    """

    name: str
    arch: str
    memory_bytes: int
    gbytes_per_s: float
    half_tflops: float
    int8_tops: float
    cores: int = 1


_V4 = Chip("TPU v4", "v4", 32 * _GIB, 1228, 275, 275)
_V5E = Chip("TPU v5e", "v5e", 16 * _GIB, 819, 197, 394)
_V5P = Chip("TPU v5p", "v5p", 95 * _GIB, 2765, 459, 918)
_V6E = Chip("TPU v6e", "v6e", 32 * _GIB, 1640, 918, 1836)
# Half a chip of 192 GiB, 7.38 TB/s, 2307 TFLOP/s in bfloat16 and 4614 in 8 bits.
_TPU7X = Chip("TPU7x, one core", "tpu7x", 96 * _GIB, 3690, 1153, 2307, cores=2)
# By PCI device id.
_CHIPS = {"0x005e": _V4, "0x0062": _V5P, "0x0063": _V5E, "0x006f": _V6E, "0x0076": _TPU7X}
_BY_NAME = {chip.name: chip for chip in _CHIPS.values()}


def known_chips() -> Sequence[Chip]:
    return tuple(_BY_NAME.values())


def chip_called(name: str) -> Chip | None:
    return _BY_NAME.get(name)


def chips_of(root: Path) -> Sequence[Chip]:
    """The TPUs on the PCI bus of the machine whose files are under ``root``, one for each of jax's
    devices."""
    found = []
    for vendor in sorted(root.glob("sys/bus/pci/devices/*/vendor")):
        if _content(vendor) == _GOOGLE:
            chip = _CHIPS.get(_content(vendor.with_name("device")))
            found += [chip] * chip.cores if chip else []
    return found


def device_nodes(root: Path) -> Sequence[Path]:
    """The nodes through which programs reach TPUs: of the driver, or of VFIO."""
    vfio = [path for path in sorted(root.glob("dev/vfio/*")) if path.name.isdigit()]
    return (*sorted(root.glob("dev/accel*")), *vfio)


def _content(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
