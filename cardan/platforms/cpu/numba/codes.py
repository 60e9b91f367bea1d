"""Quantised blocks taken apart: small whole numbers, and factors of groups of them.

Block layouts are those of ggml's ``ggml-common.h``. Every value of a row is code * scale + minimum
with the scale and minimum of its group, in float32; so computed it is what ggml's own decoders
give. Imports no torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from cardan.core.types.ggml import block_format

Bytes = npt.NDArray[np.uint8]
Codes = npt.NDArray[np.int16]
Floats = npt.NDArray[np.float32]
# Of a batch of blocks: codes [n, block elements], scales [n, groups] and minima, which may be none.
_Parts = tuple[Codes, Floats, Floats | None]

_IQ4_LEVELS: Final = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int16
)


@dataclass(frozen=True, slots=True)
class CodeFormat:
    """Codes of a format: planes of 4 bits that hold one when its ``lowest`` is taken away, and how
    many share a scale."""

    planes: int
    group: int
    lowest: int = 0


CODE_FORMATS: Final[dict[str, CodeFormat]] = {
    "q4_0": CodeFormat(1, 32),
    "q4_1": CodeFormat(1, 32),
    "q5_0": CodeFormat(2, 32),
    "q5_1": CodeFormat(2, 32),
    "q8_0": CodeFormat(2, 32, -128),
    "iq4_nl": CodeFormat(2, 32, -127),
    "q2_k": CodeFormat(1, 16),
    "q3_k": CodeFormat(1, 16),
    "q4_k": CodeFormat(1, 32),
    "q5_k": CodeFormat(2, 32),
    "q6_k": CodeFormat(2, 16),
}


def take_apart(rows: Bytes, format: str) -> tuple[Codes, Floats, Floats]:
    """Stored rows, uint8 [n, row bytes], as codes [n, row elements], and scales and minima
    [n, row elements / group]."""
    block = block_format(format)
    blocks = np.ascontiguousarray(rows).reshape(-1, block.nbytes)
    codes, scales, minima = _READERS[format](blocks)
    if minima is None:
        minima = np.zeros_like(scales)
    elements = rows.shape[1] // block.nbytes * block.elements
    factors = (len(rows), elements // CODE_FORMATS[format].group)
    return codes.reshape(len(rows), elements), scales.reshape(factors), minima.reshape(factors)


def decode(rows: Bytes, format: str) -> Floats:
    """Stored rows as float32 [n, row elements]."""
    codes, scales, minima = take_apart(rows, format)
    grouped = codes.reshape(*scales.shape, CODE_FORMATS[format].group)
    values: Floats = grouped * scales[:, :, None] + minima[:, :, None]
    return values.reshape(codes.shape)


def _halves(blocks: Bytes, start: int) -> Floats:
    """The float16 at byte ``start`` of every block, as float32 [n, 1]."""
    raw = np.ascontiguousarray(blocks[:, start : start + 2])
    return raw.view("<f2").astype(np.float32)


def _nibbles(packed: Bytes) -> Codes:
    """Of each run of bytes on the last axis, all low nibbles, then all high ones."""
    return np.concatenate((packed & 15, packed >> 4), axis=-1).astype(np.int16)


def _pairs(packed: Bytes) -> Codes:
    """64 bytes of each block to 256 numbers of two bits: each half of 32 bytes holds four runs."""
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    quads = (packed.reshape(-1, 2, 1, 32) >> shifts) & 3
    return quads.reshape(-1, 256).astype(np.int16)


def _bits(packed: Bytes) -> Codes:
    """The bits of each byte, the lowest first, [n, 8 * bytes]."""
    return np.unpackbits(packed, axis=1, bitorder="little").astype(np.int16)


def _planes(packed: Bytes) -> Codes:
    """32 bytes of each block to 256 bits: bit 0 of all of them, then bit 1, ..."""
    return _bits(packed).reshape(-1, 32, 8).transpose(0, 2, 1).reshape(-1, 256)


def _q4_0(blocks: Bytes) -> _Parts:
    scales = _halves(blocks, 0)
    return _nibbles(blocks[:, 2:]), scales, -8 * scales


def _q4_1(blocks: Bytes) -> _Parts:
    return _nibbles(blocks[:, 4:]), _halves(blocks, 0), _halves(blocks, 2)


def _q5_0(blocks: Bytes) -> _Parts:
    scales = _halves(blocks, 0)
    return _nibbles(blocks[:, 6:]) + 16 * _bits(blocks[:, 2:6]), scales, -16 * scales


def _q5_1(blocks: Bytes) -> _Parts:
    codes = _nibbles(blocks[:, 8:]) + 16 * _bits(blocks[:, 4:8])
    return codes, _halves(blocks, 0), _halves(blocks, 2)


def _q8_0(blocks: Bytes) -> _Parts:
    return blocks[:, 2:].view(np.int8).astype(np.int16), _halves(blocks, 0), None


def _iq4_nl(blocks: Bytes) -> _Parts:
    return _IQ4_LEVELS[_nibbles(blocks[:, 2:])], _halves(blocks, 0), None


def _q2_k(blocks: Bytes) -> _Parts:
    factors = blocks[:, :16]
    scales = _halves(blocks, 80) * (factors & 15)
    return _pairs(blocks[:, 16:80]), scales, -_halves(blocks, 82) * (factors >> 4)


def _q3_k(blocks: Bytes) -> _Parts:
    packed = blocks[:, 96:108]
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = ((packed[:, None, 8:] >> shifts) & 3).reshape(-1, 16).astype(np.int16)
    scales = _halves(blocks, 108) * (_nibbles(packed[:, :8]) + 16 * high - 32)
    # A clear bit of the mask means minus 4.
    return _pairs(blocks[:, 32:96]) + 4 * _planes(blocks[:, :32]), scales, -4 * scales


def _k_factors(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scales and minima of the eight groups of Q4_K and Q5_K, whose headers are alike."""
    low_scale, low_min, mixed = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate((low_scale & 63, (mixed & 15) | ((low_scale >> 2) & 48)), axis=1)
    minima = np.concatenate((low_min & 63, (mixed >> 4) | ((low_min >> 2) & 48)), axis=1)
    return _halves(blocks, 0) * scales, -_halves(blocks, 2) * minima


def _q4_k(blocks: Bytes) -> _Parts:
    codes = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 256)
    return codes, *_k_factors(blocks)


def _q5_k(blocks: Bytes) -> _Parts:
    codes = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 256)
    return codes + 16 * _planes(blocks[:, 16:48]), *_k_factors(blocks)


def _q6_k(blocks: Bytes) -> _Parts:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 256)
    scales = _halves(blocks, 208) * blocks[:, 192:208].view(np.int8)
    return low + 16 * _pairs(blocks[:, 128:192]), scales, -32 * scales


_READERS: Final[dict[str, Callable[[Bytes], _Parts]]] = {
    "q4_0": _q4_0,
    "q4_1": _q4_1,
    "q5_0": _q5_0,
    "q5_1": _q5_1,
    "q8_0": _q8_0,
    "iq4_nl": _iq4_nl,
    "q2_k": _q2_k,
    "q3_k": _q3_k,
    "q4_k": _q4_k,
    "q5_k": _q5_k,
    "q6_k": _q6_k,
}
