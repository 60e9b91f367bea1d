"""Which instruction sets the kernels are compiled for. Imports no torch.

C code asks for what it uses by the compiler's macros: ``__AVX2__``, ``__AVXVNNI__``,
``__AVX512F__`` (with BW, DQ and VL), ``__AVX512VNNI__``, ``__AVX512BF16__``, ``__AMX_BF16__`` and
``__AMX_INT8__`` (with ``__AMX_TILE__``); on Arm ``__ARM_FEATURE_DOTPROD`` and
``__ARM_FEATURE_MATMUL_INT8``. What a level has besides, the compiler may choose.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cardan.platforms.cpu.native.errors import NativeUnavailable

# The environment variable that names the highest level to use.
ISA_VARIABLE = "CARDAN_CPU_ISA"
# The lowest level of every architecture, whatever it is called.
LOWEST = "scalar"


@dataclass(frozen=True, slots=True)
class IsaLevel:
    """A set of instruction sets: the features it needs (Linux's names) and compiler flags."""

    name: str
    features: frozenset[str]
    flags: tuple[str, ...]


_AVX2 = frozenset({"avx2", "fma", "f16c"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
_AVX512_VNNI = _AVX512 | {"avx512_vnni"}
_AVX512_BF16 = _AVX512_VNNI | {"avx512_bf16"}
# Tile registers: what Linux has to allow a process before it uses these.
AMX = frozenset({"amx_tile", "amx_bf16", "amx_int8"})
_AVX2_FLAGS = ("-mavx2", "-mfma", "-mf16c")
_AVX512_FLAGS = (
    *_AVX2_FLAGS,
    *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"),
)
_AVX512_VNNI_FLAGS = (*_AVX512_FLAGS, "-mavx512vnni")
_AVX512_BF16_FLAGS = (*_AVX512_VNNI_FLAGS, "-mavx512bf16")
_AMX_FLAGS = (*_AVX512_BF16_FLAGS, "-mamx-tile", "-mamx-bf16", "-mamx-int8")
_X86 = (
    IsaLevel(LOWEST, frozenset(), ()),
    IsaLevel("avx2", _AVX2, _AVX2_FLAGS),
    IsaLevel("avx2_vnni", _AVX2 | {"avx_vnni"}, (*_AVX2_FLAGS, "-mavxvnni")),
    IsaLevel("avx512", _AVX512, _AVX512_FLAGS),
    IsaLevel("avx512_vnni", _AVX512_VNNI, _AVX512_VNNI_FLAGS),
    IsaLevel("avx512_bf16", _AVX512_BF16, _AVX512_BF16_FLAGS),
    IsaLevel("amx", _AVX512_BF16 | AMX, _AMX_FLAGS),
)
_I8MM = frozenset({"asimddp", "i8mm", "bf16"})
_I8MM_MARCH = "-march=armv8.2-a+fp16+dotprod+i8mm+bf16"
_ARM = (
    # Vectors of 128 bits are part of the architecture, so the compiler uses them unasked.
    IsaLevel("neon", frozenset(), ()),
    IsaLevel("dotprod", frozenset({"asimddp", "asimdhp"}), ("-march=armv8.2-a+fp16+dotprod",)),
    IsaLevel("i8mm", _I8MM | {"asimdhp"}, (_I8MM_MARCH,)),
    IsaLevel("sve", _I8MM | {"asimdhp", "sve"}, (f"{_I8MM_MARCH}+sve",)),
)
# Elsewhere the compiler's default has the vectors that every machine of the kind has.
_OTHER = (IsaLevel(LOWEST, frozenset(), ()),)
_LEVELS = {"x86_64": _X86, "amd64": _X86, "aarch64": _ARM, "arm64": _ARM}


def usable_levels(
    machine: str, features: Sequence[str], environment: Mapping[str, str]
) -> tuple[IsaLevel, ...]:
    """The levels that ``features`` allow, the highest first, none above the one that
    ``CARDAN_CPU_ISA`` names; never empty.

    ``machine`` is the architecture as ``platform.machine()`` says it.

    Raises:
        NativeUnavailable: the variable names no level of this architecture.
    """
    levels = _LEVELS.get(machine.lower(), _OTHER)
    names = [level.name for level in levels]
    highest = environment.get(ISA_VARIABLE) or names[-1]
    if highest == LOWEST:
        highest = names[0]
    if highest not in names:
        raise NativeUnavailable(
            f"{ISA_VARIABLE}={highest!r} is not known on {machine}; known: {', '.join(names)}"
        )
    found = set(features)
    allowed = levels[: names.index(highest) + 1]
    return tuple(level for level in reversed(allowed) if level.features <= found)


def choose_level(machine: str, features: Sequence[str], environment: Mapping[str, str]) -> IsaLevel:
    """The first of ``usable_levels``, which raises for it."""
    return usable_levels(machine, features, environment)[0]
