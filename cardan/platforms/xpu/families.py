"""Families of Intel's GPUs that torch's ``xpu`` device serves, by PCI id; imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    """GPUs of one architecture.

    ``ids``: first and last PCI device ids of ranges. ``lacks_fp64``: float64 is emulated, where the
    driver is told to.
    """

    title: str
    arch: str
    ids: tuple[tuple[int, int], ...]
    is_integrated: bool = False
    lacks_fp64: bool = False


# As in Linux's list of Intel's PCI ids (include/drm/intel/pciids.h). Older GPUs, which torch's
# builds have no kernels for, are in none.
FAMILIES: tuple[Family, ...] = (
    Family("Ponte Vecchio", "xe_hpc", ((0x0B69, 0x0B6E), (0x0BD0, 0x0BE5))),
    Family("Alchemist", "xe_hpg", ((0x4F80, 0x4F88), (0x5690, 0x56C2)), lacks_fp64=True),
    Family("Battlemage", "xe2_hpg", ((0xE202, 0xE223),)),
    Family(
        "Meteor Lake",
        "xe_lpg",
        ((0x7D40, 0x7D40), (0x7D45, 0x7D45), (0x7D55, 0x7D60), (0x7DD5, 0x7DD5)),
        is_integrated=True,
    ),
    Family("Arrow Lake", "xe_lpg", ((0x7D41, 0x7D41), (0x7D67, 0x7D67)), True),
    Family("Arrow Lake H", "xe_lpg_plus", ((0x7D51, 0x7D51), (0x7DD1, 0x7DD1)), True),
    Family("Lunar Lake", "xe2_lpg", ((0x6420, 0x64B0),), True),
    Family("Panther Lake", "xe3_lpg", ((0xB080, 0xB0B0),), True),
)
# Architectures without instructions for products of matrices.
_WITHOUT_XMX = frozenset({"xe_lpg"})
# Architectures that load and store blocks of matrices by themselves.
_WITH_BLOCK_IO = frozenset({"xe_hpc", "xe2_hpg", "xe2_lpg", "xe3_lpg"})
# Ponte Vecchio of two tiles.
_TWO_TILES = frozenset({0x0B69, 0x0BD0, 0x0BD5, 0x0BD6, 0x0BD7, 0x0BD8, 0x0BE5})


def family_of(device_id: int) -> Family | None:
    """None: no GPU that torch serves."""
    for family in FAMILIES:
        if any(first <= device_id <= last for first, last in family.ids):
            return family
    return None


def num_tiles(device_id: int) -> int:
    """Parts of a card that are devices of their own, unless the driver is told to join them."""
    return 2 if device_id in _TWO_TILES else 1


def features(arch: str) -> tuple[str, ...]:
    """Words that kernels may ask for."""
    found = () if arch in _WITHOUT_XMX else ("xmx",)
    return (*found, "block_io") if arch in _WITH_BLOCK_IO else found
