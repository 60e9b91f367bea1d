"""What AMD's GPUs can do, by the compiler's name of their instruction set; imports no torch."""

from dataclasses import dataclass
from typing import Literal

# Forms of 8-bit floating point numbers that a GPU's instructions know. ``ocp`` is torch's
# ``float8_e4m3fn``. In ``fnuz`` the same bits mean half as much, and those of OCP's negative zero
# (0x80) are NaN: one must never be read as the other.
Float8 = Literal["none", "fnuz", "ocp"]

_KIB = 1 << 10


@dataclass(frozen=True, slots=True)
class Architecture:
    """Facts of one instruction set.

    Attributes:
        name: the compiler's (``gfx942``).
        lanes: of a wavefront.
        products: the family of its matrix instructions.
        lds_bytes: that the threads of a program can share.
        float8: the form that its instructions convert.
    """

    name: str
    lanes: Literal[32, 64]
    products: Literal["mfma", "wmma"]
    lds_bytes: int
    float8: Float8


# In AMD's documents of instruction sets: CDNA 2 to 4, RDNA 3 and 4.
_ARCHITECTURES = {
    item.name: item
    for item in (
        Architecture("gfx90a", 64, "mfma", 64 * _KIB, "none"),
        Architecture("gfx942", 64, "mfma", 64 * _KIB, "fnuz"),
        Architecture("gfx950", 64, "mfma", 160 * _KIB, "ocp"),
        Architecture("gfx1100", 32, "wmma", 64 * _KIB, "none"),
        Architecture("gfx1101", 32, "wmma", 64 * _KIB, "none"),
        Architecture("gfx1102", 32, "wmma", 64 * _KIB, "none"),
        Architecture("gfx1200", 32, "wmma", 64 * _KIB, "ocp"),
        Architecture("gfx1201", 32, "wmma", 64 * _KIB, "ocp"),
    )
}


def architecture(name: str) -> Architecture | None:
    """Facts of the instruction set; None: this platform does not know it."""
    return _ARCHITECTURES.get(name)


def known_architectures() -> tuple[str, ...]:
    return tuple(_ARCHITECTURES)


def features(found: Architecture) -> tuple[str, ...]:
    """Words that kernels' needs may name: the instruction set, the family of its matrix
    instructions, its lanes, and the form of its 8-bit floating point numbers."""
    words = (found.name, found.products, f"wave{found.lanes}")
    return words if found.float8 == "none" else (*words, f"float8_{found.float8}")
