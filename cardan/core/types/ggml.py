"""The tensor types of GGML: ids, names and block sizes, as fixed by the GGUF file format.

A *format* is the lower-case name of a type whose blocks hold quantised numbers: ``q4_0``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class GGMLType(IntEnum):
    """Type ids as stored in a GGUF tensor table. Missing ids were withdrawn from the format."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40
    Q1_0 = 41


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """How one type is stored: `elements` values share a block of `nbytes` bytes."""

    elements: int
    nbytes: int


BLOCK_FORMATS: dict[GGMLType, BlockFormat] = {
    GGMLType.F32: BlockFormat(1, 4),
    GGMLType.F16: BlockFormat(1, 2),
    GGMLType.Q4_0: BlockFormat(32, 18),
    GGMLType.Q4_1: BlockFormat(32, 20),
    GGMLType.Q5_0: BlockFormat(32, 22),
    GGMLType.Q5_1: BlockFormat(32, 24),
    GGMLType.Q8_0: BlockFormat(32, 34),
    GGMLType.Q8_1: BlockFormat(32, 40),
    GGMLType.Q2_K: BlockFormat(256, 84),
    GGMLType.Q3_K: BlockFormat(256, 110),
    GGMLType.Q4_K: BlockFormat(256, 144),
    GGMLType.Q5_K: BlockFormat(256, 176),
    GGMLType.Q6_K: BlockFormat(256, 210),
    GGMLType.Q8_K: BlockFormat(256, 292),
    GGMLType.IQ2_XXS: BlockFormat(256, 66),
    GGMLType.IQ2_XS: BlockFormat(256, 74),
    GGMLType.IQ3_XXS: BlockFormat(256, 98),
    GGMLType.IQ1_S: BlockFormat(256, 50),
    GGMLType.IQ4_NL: BlockFormat(32, 18),
    GGMLType.IQ3_S: BlockFormat(256, 110),
    GGMLType.IQ2_S: BlockFormat(256, 82),
    GGMLType.IQ4_XS: BlockFormat(256, 136),
    GGMLType.I8: BlockFormat(1, 1),
    GGMLType.I16: BlockFormat(1, 2),
    GGMLType.I32: BlockFormat(1, 4),
    GGMLType.I64: BlockFormat(1, 8),
    GGMLType.F64: BlockFormat(1, 8),
    GGMLType.IQ1_M: BlockFormat(256, 56),
    GGMLType.BF16: BlockFormat(1, 2),
    GGMLType.TQ1_0: BlockFormat(256, 54),
    GGMLType.TQ2_0: BlockFormat(256, 66),
    GGMLType.MXFP4: BlockFormat(32, 17),
    GGMLType.NVFP4: BlockFormat(64, 36),
    GGMLType.Q1_0: BlockFormat(128, 18),
}

# The formats that operations on stored blocks are defined for.
BLOCK_TYPES: dict[str, GGMLType] = {
    ggml_type.name.lower(): ggml_type
    for ggml_type in (
        GGMLType.Q4_0,
        GGMLType.Q4_1,
        GGMLType.Q5_0,
        GGMLType.Q5_1,
        GGMLType.Q8_0,
        GGMLType.Q2_K,
        GGMLType.Q3_K,
        GGMLType.Q4_K,
        GGMLType.Q5_K,
        GGMLType.Q6_K,
        GGMLType.IQ4_NL,
    )
}


def block_format(name: str) -> BlockFormat:
    """How the format called ``name`` is stored; ``BLOCK_TYPES`` has the names."""
    return BLOCK_FORMATS[BLOCK_TYPES[name]]
