"""What devices differ in for the kernels: the memory that programs share, the family of matrix
instructions, and the compiler's options that go with these; imports neither torch nor Triton.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

# Families of matrix instructions. ``mma``: of warps of 32 lanes, whose operands come from shared
# memory that several copies fill at once; ``mfma``: of 64 lanes with 512 registers each; ``wmma``:
# of 32 lanes with 256 registers, of which operands take twice their size.
Products = Literal["mma", "mfma", "wmma"]


@dataclass(frozen=True, slots=True)
class Target:
    """Devices of one instruction set.

    Attributes:
        products: the family of its matrix instructions.
        shared_bytes: that a program's threads can share; None: torch says it.
        copies_directly: copies to shared memory pass no registers, so that each stage of a loop
            has its tile there; else the newest is in registers.
        options: the compiler's, for kernels that multiply matrices.
        settling: the instruction that waits until a wave's stores are where others of its program
            may publish them; empty: barriers do that.
    """

    products: Products = "mma"
    shared_bytes: int | None = None
    copies_directly: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    settling: str = ""


# Products of 16 x 16 have the least latency for the fewest registers; ``kpack`` reads two of their
# operands' parts at once.
_NARROW = {"matrix_instr_nonkdim": 16}
_PACKED = {**_NARROW, "kpack": 2}
_ANY_COUNT = "s_waitcnt vmcnt(0)"
# By what names begin with.
_TARGETS = {
    "gfx90a": Target("mfma", 64 << 10, False, _PACKED, _ANY_COUNT),
    "gfx942": Target("mfma", 64 << 10, False, _PACKED, _ANY_COUNT),
    "gfx950": Target("mfma", 160 << 10, True, _NARROW, _ANY_COUNT),
    "gfx11": Target("wmma", 64 << 10, False, settling="s_waitcnt_vscnt null, 0x0"),
    "gfx12": Target("wmma", 64 << 10, False, settling="s_wait_storecnt 0x0"),
}
_OTHER = Target()


@dataclass(frozen=True, slots=True)
class DeviceSizes:
    """What tiles depend on: cores, bytes of memory that a program's threads can share, and how
    matrices are multiplied, as of ``Target``."""

    num_cores: int
    shared_bytes: int
    products: Products = "mma"
    copies_directly: bool = True

    @property
    def spare_stages(self) -> int:
        """Stages of a loop whose tiles are not in shared memory."""
        return 0 if self.copies_directly else 1


def target_named(arch: str | int) -> Target:
    """Of an architecture as Triton's driver names it."""
    name = str(arch)
    return next((item for key, item in _TARGETS.items() if name.startswith(key)), _OTHER)
