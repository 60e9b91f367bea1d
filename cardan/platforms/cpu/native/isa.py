"""Which instruction sets the kernels are compiled for. Imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cardan.platforms.cpu.native.errors import NativeUnavailable

# The environment variable that names the highest level to use.
ISA_VARIABLE = "CARDAN_CPU_ISA"
# Levels above it pass the tests where they were run, but no gain was measured yet, so they have to
# be asked for.
_HIGHEST_UNASKED = "avx2"


@dataclass(frozen=True, slots=True)
class IsaLevel:
    """A set of instruction sets: the features it needs (Linux's names) and compiler flags."""

    name: str
    features: frozenset[str]
    flags: tuple[str, ...]


_AVX2 = frozenset({"avx2", "fma", "f16c"})
_AVX512 = _AVX2 | {"avx512f"}
_AVX2_FLAGS = ("-mavx2", "-mfma", "-mf16c")
_AVX512_FLAGS = (*_AVX2_FLAGS, "-mavx512f", "-mprefer-vector-width=512")
_X86 = (
    IsaLevel("scalar", frozenset(), ()),
    IsaLevel("avx2", _AVX2, _AVX2_FLAGS),
    IsaLevel("avx512", _AVX512, _AVX512_FLAGS),
    IsaLevel("avx512_bf16", _AVX512 | {"avx512_bf16"}, (*_AVX512_FLAGS, "-mavx512bf16")),
)
# Elsewhere the compiler's default has the vectors that every machine of the kind has.
_OTHER = (IsaLevel("scalar", frozenset(), ()),)


def choose_level(machine: str, features: Sequence[str], environment: Mapping[str, str]) -> IsaLevel:
    """The highest level that ``features`` allow, at most the one that ``CARDAN_CPU_ISA`` names,
    or, if it names none, AVX2.

    ``machine`` is the architecture as ``platform.machine()`` says it.

    Raises:
        NativeUnavailable: the variable names no level of this architecture.
    """
    levels = _X86 if machine.lower() in ("x86_64", "amd64") else _OTHER
    names = [level.name for level in levels]
    usual = _HIGHEST_UNASKED if _HIGHEST_UNASKED in names else names[-1]
    highest = environment.get(ISA_VARIABLE) or usual
    if highest not in names:
        raise NativeUnavailable(
            f"{ISA_VARIABLE}={highest!r} is not known on {machine}; known: {', '.join(names)}"
        )
    found = set(features)
    allowed = levels[: names.index(highest) + 1]
    return [level for level in allowed if level.features <= found][-1]
