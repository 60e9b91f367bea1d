"""Which row of a ragged step a tile belongs to."""

import triton
import triton.language as tl


@triton.jit
def row_of(tile, start_loc, num_rows, TILE: tl.constexpr):
    """The row that a tile belongs to; num_rows: what comes after all rows. Row r's tiles begin at
    start // TILE + r, which leaves room for the part of a tile at the end of each row before it."""
    low = 0
    high = num_rows + 1
    while low < high:
        middle = (low + high) // 2
        first_tile = tl.load(start_loc + middle) // TILE + middle
        if first_tile <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1
