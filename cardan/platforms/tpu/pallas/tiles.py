"""Sizes of tiles: what TPUs hold of an array in vector memory, and how much of it fits."""

from jax import Array

# A row of vector memory.
LANES = 128
# Rows of a tile are 32 bits deep: narrower numbers lie several to a place.
_TILE_ROW_BYTES = 32


def tile_rows(array: Array) -> int:
    """Rows of a tile of this array's dtype: 8 of float32, 16 of bfloat16."""
    itemsize: int = array.dtype.itemsize
    return _TILE_ROW_BYTES // itemsize


def round_up(number: int, multiple: int) -> int:
    """The least multiple that is no less than ``number``."""
    return -(-number // multiple) * multiple


def largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of ``number`` that is at most ``limit``; 1 if the limit is below."""
    return max(
        part for part in range(1, number + 1) if number % part == 0 and part <= max(limit, 1)
    )
