"""Sizes of the tiles of products with experts' weights, from how many rows experts get."""

from dataclasses import dataclass, replace

# Tiles of so many pairs of a token and an expert, up to so many pairs for each expert in the mean:
# most experts then have one tile, so that their weights are read once.
_TILES = ((8, 16), (24, 32), (96, 64))
_LARGEST_TILE = 128
# The narrowest slices of inputs and outputs that are worth it, and that products can have.
_LEAST_BLOCK = 32
_LEAST_WIDTH = 16
# What programs share besides operands: the compiler's barriers.
_SPARE_BYTES = 1 << 10


@dataclass(frozen=True, slots=True)
class ProductSizes:
    """Of one product: inputs, outputs, bytes of an element, and projections that are multiplied
    side by side (2 for gate and up)."""

    inputs: int
    outputs: int
    num_bytes: int
    projections: int


@dataclass(frozen=True, slots=True)
class ProductTuning:
    """Outputs and inputs of a tile, tiles that share weights while they are in the cache, and the
    compiler's numbers."""

    width: int
    block: int
    group: int
    num_warps: int
    num_stages: int


def tile_of(num_pairs: int, num_experts: int) -> int:
    """Pairs of a tile."""
    for mean, tile in _TILES:
        if num_pairs <= mean * num_experts:
            return tile
    return _LARGEST_TILE


def most_tiles(num_pairs: int, num_experts: int, tile: int) -> int:
    """More are never needed: whole tiles, and one that is not full for each expert that has any."""
    return num_pairs // tile + min(num_pairs, num_experts)


def product_tuning(sizes: ProductSizes, tile: int, shared_bytes: int) -> ProductTuning:
    """Small tiles read weights, for which several programs a core with few warps are best; large
    ones multiply, for which large tiles are."""
    if tile < _LARGEST_TILE:
        wanted = ProductTuning(128 // sizes.projections, 64, 1, num_warps=4, num_stages=4)
    else:
        wanted = ProductTuning(256 // sizes.projections, 64, 8, num_warps=8, num_stages=3)
    if sizes.num_bytes > 2:
        wanted = replace(wanted, width=wanted.width // 2, block=_LEAST_BLOCK, num_stages=2)
    wanted = replace(
        wanted,
        width=_limited(wanted.width, sizes.outputs),
        block=_limited(wanted.block, sizes.inputs),
    )
    room = shared_bytes - _SPARE_BYTES
    while wanted.num_stages * _stage_bytes(sizes, wanted, tile) > room:
        if wanted.num_stages > 2:
            wanted = replace(wanted, num_stages=wanted.num_stages - 1)
        elif wanted.block > _LEAST_BLOCK:
            wanted = replace(wanted, block=wanted.block // 2)
        elif wanted.width > _LEAST_WIDTH:
            wanted = replace(wanted, width=wanted.width // 2)
        else:
            break
    return wanted


def _stage_bytes(sizes: ProductSizes, tuning: ProductTuning, tile: int) -> int:
    return (tuning.width * sizes.projections + tile) * tuning.block * sizes.num_bytes


def _limited(size: int, needed: int) -> int:
    """``size``, or less if a smaller power of two holds what is needed."""
    while size > _LEAST_WIDTH and size // 2 >= needed:
        size //= 2
    return size
