"""Decoders of GGML quantisation blocks in NumPy.

Block layouts follow ggml's `ggml-common.h`; the order of the float operations follows its reference
decoders in `ggml-quants.c`, so that results are bit-equal to theirs in float32.

Every decoder takes `blocks`, uint8 `[n, block bytes]`, and fills `out`, float32
`[n, block elements]`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from cardan.core.types.ggml import BLOCK_FORMATS, GGMLType

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

# The 16 levels of the non-linear 4-bit types.
_IQ4_LEVELS: Final = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)
_NIBBLE_SHIFTS: Final = np.array([0, 4], np.uint8)
_PAIR_SHIFTS: Final = np.array([0, 2, 4, 6], np.uint8)
_BIT_SHIFTS: Final = np.arange(8, dtype=np.uint8)
# Elements decoded at a time: the scratch of a chunk stays within a core's cache.
_CHUNK_ELEMENTS: Final = 1 << 16


def _halves(blocks: Bytes, start: int) -> Floats:
    """The float16 at byte `start` of every block, as float32 `[n, 1]`."""
    raw = np.ascontiguousarray(blocks[:, start : start + 2])
    return raw.view("<f2").astype(np.float32)


def _fill_nibbles(packed: Bytes, out: Floats) -> None:
    """Low nibbles of 16 bytes are elements 0 to 15 of a block of 32, high nibbles 16 to 31."""
    out[:, :16] = packed & 15
    out[:, 16:] = packed >> 4


def _five_bits(blocks: Bytes, start: int) -> Bytes:
    """32 numbers of 5 bits: 4 bytes of high bits at `start`, then 16 bytes of nibbles."""
    high = np.unpackbits(blocks[:, start : start + 4], axis=1, bitorder="little")
    packed = blocks[:, start + 4 : start + 20]
    high <<= 4
    high[:, :16] |= packed & 15
    high[:, 16:] |= packed >> 4
    return high


def _q4_0(blocks: Bytes, out: Floats) -> None:
    _fill_nibbles(blocks[:, 2:], out)
    out -= 8
    out *= _halves(blocks, 0)


def _q4_1(blocks: Bytes, out: Floats) -> None:
    _fill_nibbles(blocks[:, 4:], out)
    out *= _halves(blocks, 0)
    out += _halves(blocks, 2)


def _q5_0(blocks: Bytes, out: Floats) -> None:
    out[:] = _five_bits(blocks, 2)
    out -= 16
    out *= _halves(blocks, 0)


def _q5_1(blocks: Bytes, out: Floats) -> None:
    out[:] = _five_bits(blocks, 4)
    out *= _halves(blocks, 0)
    out += _halves(blocks, 2)


def _q8_0(blocks: Bytes, out: Floats) -> None:
    out[:] = blocks[:, 2:].view(np.int8)
    out *= _halves(blocks, 0)


def _iq4_nl(blocks: Bytes, out: Floats) -> None:
    packed = blocks[:, 2:]
    out[:, :16] = _IQ4_LEVELS[packed & 15]
    out[:, 16:] = _IQ4_LEVELS[packed >> 4]
    out *= _halves(blocks, 0)


def _two_bits(packed: Bytes) -> Bytes:
    """64 bytes to `[n, 2, 4, 32]`: each half of 32 bytes holds four runs of 32 numbers."""
    quads = packed.reshape(-1, 2, 1, 32) >> _PAIR_SHIFTS[:, None]
    quads &= 3
    return quads


def _q2_k(blocks: Bytes, out: Floats) -> None:
    n = len(blocks)
    scales = blocks[:, :16]
    step = _halves(blocks, 80) * (scales & 15)
    offset = _halves(blocks, 82) * (scales >> 4)
    out.reshape(n, 2, 4, 32)[:] = _two_bits(blocks[:, 16:80])
    groups = out.reshape(n, 16, 16)
    groups *= step[:, :, None]
    groups -= offset[:, :, None]


def _q3_k_scales(packed: Bytes) -> npt.NDArray[np.int8]:
    """12 bytes to 16 signed scales: nibbles of the first 8, then pairs of bits of the last 4."""
    n = len(packed)
    scales = (packed[:, None, :8] >> _NIBBLE_SHIFTS[:, None]).reshape(n, 16) & 15
    high = (packed[:, None, 8:] >> _PAIR_SHIFTS[:, None]).reshape(n, 16) & 3
    scales |= high << 4
    return scales.view(np.int8) - np.int8(32)


def _q3_k(blocks: Bytes, out: Floats) -> None:
    n = len(blocks)
    # A clear bit of the mask means minus 4.
    high = blocks[:, None, :32] >> _BIT_SHIFTS[:, None]
    high &= 1
    high <<= 2
    numbers = _two_bits(blocks[:, 32:96]).reshape(n, 8, 32)
    numbers |= high
    out.reshape(n, 8, 32)[:] = numbers
    out -= 4
    step = _halves(blocks, 108) * _q3_k_scales(blocks[:, 96:108])
    groups = out.reshape(n, 16, 16)
    groups *= step[:, :, None]


def _k_scales(packed: Bytes) -> tuple[Bytes, Bytes]:
    """12 bytes to eight 6-bit scales and eight 6-bit minima, as Q4_K and Q5_K pack them."""
    low_scale, low_min, mixed = packed[:, :4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate(
        [low_scale & 63, (mixed & 15) | ((low_scale >> 2) & 48)], axis=1, dtype=np.uint8
    )
    minima = np.concatenate(
        [low_min & 63, (mixed >> 4) | ((low_min >> 2) & 48)], axis=1, dtype=np.uint8
    )
    return scales, minima


def _scale_and_shift(blocks: Bytes, out: Floats) -> None:
    """Turn the plain numbers in `out` into values with the header that Q4_K and Q5_K share."""
    scales, minima = _k_scales(blocks[:, 4:16])
    step = _halves(blocks, 0) * scales
    offset = _halves(blocks, 2) * minima
    groups = out.reshape(len(blocks), 8, 32)
    groups *= step[:, :, None]
    groups -= offset[:, :, None]


def _q4_k(blocks: Bytes, out: Floats) -> None:
    n = len(blocks)
    packed = blocks[:, 16:].reshape(n, 4, 32)
    runs = out.reshape(n, 4, 2, 32)
    runs[:, :, 0] = packed & 15
    runs[:, :, 1] = packed >> 4
    _scale_and_shift(blocks, out)


def _q5_k(blocks: Bytes, out: Floats) -> None:
    n = len(blocks)
    numbers = blocks[:, None, 16:48] >> _BIT_SHIFTS[:, None]
    numbers &= 1
    numbers <<= 4
    packed = blocks[:, 48:].reshape(n, 4, 32)
    runs = numbers.reshape(n, 4, 2, 32)
    runs[:, :, 0] |= packed & 15
    runs[:, :, 1] |= packed >> 4
    out.reshape(n, 8, 32)[:] = numbers
    _scale_and_shift(blocks, out)


def _q6_k(blocks: Bytes, out: Floats) -> None:
    n = len(blocks)
    # Each half of the block: 64 bytes of nibbles (all low ones first) and 32 of high pairs.
    numbers = _two_bits(blocks[:, 128:192])
    numbers <<= 4
    packed = blocks[:, :128].reshape(n, 2, 2, 32)
    numbers[:, :, :2] |= packed & 15
    numbers[:, :, 2:] |= packed >> 4
    out.reshape(n, 2, 4, 32)[:] = numbers
    out -= 32
    step = _halves(blocks, 208) * blocks[:, 192:208].view(np.int8)
    groups = out.reshape(n, 16, 16)
    groups *= step[:, :, None]


DECODERS: Final[dict[GGMLType, Callable[[Bytes, Floats], None]]] = {
    GGMLType.Q4_0: _q4_0,
    GGMLType.Q4_1: _q4_1,
    GGMLType.Q5_0: _q5_0,
    GGMLType.Q5_1: _q5_1,
    GGMLType.Q8_0: _q8_0,
    GGMLType.Q2_K: _q2_k,
    GGMLType.Q3_K: _q3_k,
    GGMLType.Q4_K: _q4_k,
    GGMLType.Q5_K: _q5_k,
    GGMLType.Q6_K: _q6_k,
    GGMLType.IQ4_NL: _iq4_nl,
}


def decode_rows(rows: Bytes, ggml_type: GGMLType) -> Floats:
    """Rows of whole blocks, uint8 [n, row bytes], as float32 [n, row elements]."""
    block = BLOCK_FORMATS[ggml_type]
    num_rows, row_bytes = rows.shape
    row_elements = row_bytes // block.nbytes * block.elements
    out = np.empty((num_rows, row_elements), np.float32)
    decode = DECODERS[ggml_type]
    step = max(1, _CHUNK_ELEMENTS // max(row_elements, 1))
    # Damaged scales may be infinite: the result says so, without a warning for every chunk.
    with np.errstate(all="ignore"):
        for start in range(0, num_rows, step):
            chunk = np.ascontiguousarray(rows[start : start + step])
            decode(
                chunk.reshape(-1, block.nbytes),
                out[start : start + step].reshape(-1, block.elements),
            )
    return out
