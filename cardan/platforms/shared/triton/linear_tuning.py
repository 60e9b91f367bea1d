"""Which products of few rows have kernels of their own, and the sizes of these kernels' tiles.

Measured on an H200 in chains of products, as the layers of a model are.
"""

from dataclasses import dataclass

from cardan.platforms.shared.triton.rows import power_of_two

# Other matrices are the library's: rows that are not aligned are read slowly, and a tile should
# be full.
_ALIGNMENT = 64
_LEAST_OUTPUTS = 64
# Rows up to which the kernel for few rows is the faster one.
_MOST_ROWS = 64
# Outputs of a tile.
_TILE = 64
# Programs with which a device has one for each of its cores, about.
_ENOUGH_PROGRAMS = 128
# Tiles that alone are nearly enough: shares of the inputs must be long to be worth adding up.
_MANY_TILES = 90
_LEAST_SHARE = 256
_LEAST_LONG_SHARE = 1024
# A program that goes through more inputs than this is better two.
_MOST_SHARE = 4096
# Inputs of a product of one row from which on a program takes a single output.
_LONG_ROW = 8192


@dataclass(frozen=True, slots=True)
class RowTuning:
    """Of a program for one row: its outputs, and the inputs that it has in hand."""

    outputs: int
    block: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class SkinnyTuning:
    """Of a program for a few rows: outputs and inputs of a tile, and among how many programs the
    inputs are shared out."""

    outputs: int
    block: int
    shares: int
    num_warps: int
    num_stages: int

    def share(self, inputs: int) -> int:
        """Inputs of each share, whole blocks; the last one may have fewer. All of them if there is
        one share."""
        if self.shares == 1:
            return inputs
        return -(-inputs // (self.shares * self.block)) * self.block


def row_tuning(inputs: int) -> RowTuning:
    if inputs >= _LONG_ROW:
        return RowTuning(1, 2048, num_warps=4)
    if inputs > 1024:
        return RowTuning(2, 2048, num_warps=8)
    return RowTuning(4, power_of_two(inputs), num_warps=2)


def skinny_tuning(num_rows: int, outputs: int, inputs: int) -> SkinnyTuning | None:
    """None: the library is as fast."""
    if num_rows > _MOST_ROWS or outputs < _LEAST_OUTPUTS or inputs % _ALIGNMENT:
        return None
    tiles = -(-outputs // _TILE)
    shares = _num_shares(num_rows, tiles, inputs)
    if num_rows > 32 and tiles * shares > _ENOUGH_PROGRAMS:
        # Two programs fit into a core.
        return SkinnyTuning(_TILE, 64, shares, num_warps=4, num_stages=5)
    return SkinnyTuning(_TILE, 128, shares, num_warps=4, num_stages=4)


def _num_shares(num_rows: int, tiles: int, inputs: int) -> int:
    least = _LEAST_SHARE
    if tiles >= _MANY_TILES:
        least = _LEAST_LONG_SHARE if num_rows <= 16 else inputs
    shares = 1
    while tiles * shares < _ENOUGH_PROGRAMS and inputs // (2 * shares) >= least:
        shares *= 2
    if num_rows <= 32 and tiles * shares < 2 * _ENOUGH_PROGRAMS and inputs // shares > _MOST_SHARE:
        shares *= 2
    return shares
