"""Random numbers as a pure function of a seed and a position.

Whoever samples draws from them (ADR 0003), so that a seed gives the same tokens on every platform.
"""

import numpy as np
import numpy.typing as npt

# SplitMix64: G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number generators",
# OOPSLA 2014; multipliers and shifts of D. Stafford's variant 13.
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)
_TO_53_BITS = np.uint64(11)
_ONE = np.uint64(1)
_SCALE = np.float64(2.0**-53)

UInt64 = npt.NDArray[np.uint64]


def random_streams(seeds: npt.NDArray[np.int64]) -> UInt64:
    """The streams [N] of any seeds, for ``uniforms``: prepared once, for all positions."""
    return _mixed(seeds.astype(np.uint64) + _GAMMA)


def uniforms(streams: UInt64, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Uniform numbers in [0, 1) with 53 random bits.

    Element i is draw number ``positions[i]`` of a SplitMix64 generator whose state is
    ``streams[i]``, the first output of SplitMix64(seed); so it depends on nothing else,
    neighbouring seeds have unrelated streams, and a stream can be entered anywhere.

    Args:
        streams: [N].
        positions: [N] int64, >= 0.
    """
    states = positions.astype(np.uint64)
    states += _ONE
    states *= _GAMMA
    states += streams
    draws = _mixed(states)
    draws >>= _TO_53_BITS
    return draws * _SCALE


def _mixed(z: UInt64) -> UInt64:
    """``z`` is written."""
    z ^= z >> _SHIFT_1
    z *= _MULTIPLIER_1
    z ^= z >> _SHIFT_2
    z *= _MULTIPLIER_2
    z ^= z >> _SHIFT_3
    return z
