"""Random numbers as a pure function of a seed and a position."""

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


def uniforms(
    seeds: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Uniform numbers in [0, 1) with 53 random bits.

    Element i is draw number ``positions[i]`` of a SplitMix64 generator whose state is the first
    output of SplitMix64(``seeds[i]``); so it depends on nothing else, neighbouring seeds have
    unrelated streams, and a stream can be entered anywhere.

    Args:
        seeds: [N] int64, any value.
        positions: [N] int64, >= 0.
    """
    states = _mixed(seeds.astype(np.uint64) + _GAMMA)
    draws = _mixed(states + (positions.astype(np.uint64) + _ONE) * _GAMMA)
    return (draws >> _TO_53_BITS).astype(np.float64) * 2.0**-53


def _mixed(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> _SHIFT_1)) * _MULTIPLIER_1
    z = (z ^ (z >> _SHIFT_2)) * _MULTIPLIER_2
    return z ^ (z >> _SHIFT_3)
