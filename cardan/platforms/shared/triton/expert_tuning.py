"""Sizes of the tiles of products with experts' weights, from how many rows experts get."""

from dataclasses import dataclass, replace

from cardan.platforms.shared.triton.targets import DeviceSizes

# Tiles of so many pairs of a token and an expert, up to so many pairs for each expert in the mean:
# most experts then have one tile, so that their weights are read once.
_TILES = ((12, 16), (24, 32), (96, 64))
_LARGEST_TILE = 128
# The narrowest slices of inputs and outputs that are worth it, and that products can have.
_LEAST_BLOCK = 32
_LEAST_WIDTH = 16
# Stages where other instructions than ``mma`` multiply; not measured. One more takes as much memory
# as another program.
_MATRIX_STAGES = 2
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
    """Outputs and inputs of a tile, tiles that share weights while they are in the cache, the
    compiler's numbers, and whether weights are the left side of products."""

    width: int
    block: int
    group: int
    num_warps: int
    num_stages: int
    weights_left: bool = True


# By pairs of a tile: of gate and up side by side, and of a single projection. Up to 256 tokens this
# reads weights at 86 % to 97 % of an H200's bandwidth; tiles of 128 multiply at 450 to 530 TFLOP/s.
# Measured in recorded chains of layers as in Qwen3-30B-A3B (128 experts, 8 of them for a token, of
# 768 x 2048) in bfloat16, with even routing.
_PAIRED = {
    16: ProductTuning(64, 128, 1, num_warps=4, num_stages=4),
    32: ProductTuning(64, 128, 1, num_warps=4, num_stages=4),
    64: ProductTuning(128, 64, 1, num_warps=8, num_stages=5),
    128: ProductTuning(128, 64, 4, num_warps=8, num_stages=4),
}
_SINGLE = {
    16: ProductTuning(128, 128, 1, num_warps=8, num_stages=3),
    32: ProductTuning(256, 64, 1, num_warps=8, num_stages=3),
    64: ProductTuning(256, 64, 1, num_warps=8, num_stages=5),
    128: ProductTuning(256, 64, 8, num_warps=8, num_stages=4, weights_left=False),
}


def tile_of(num_pairs: int, num_experts: int) -> int:
    """Pairs of a tile."""
    for mean, tile in _TILES:
        if num_pairs <= mean * num_experts:
            return tile
    return _LARGEST_TILE


def most_tiles(num_pairs: int, num_experts: int, tile: int) -> int:
    """More are never needed: whole tiles, and one that is not full for each expert that has any."""
    return num_pairs // tile + min(num_pairs, num_experts)


def product_tuning(sizes: ProductSizes, tile: int, device: DeviceSizes) -> ProductTuning:
    """For tiles as of ``tile_of``."""
    wanted = (_PAIRED if sizes.projections > 1 else _SINGLE)[tile]
    if sizes.num_bytes > 2:
        wanted = replace(wanted, width=wanted.width // 2, block=_LEAST_BLOCK, num_stages=2)
    wanted = replace(
        wanted,
        width=_limited(wanted.width, sizes.outputs),
        block=_limited(wanted.block, sizes.inputs),
    )
    if device.products != "mma":
        wanted = replace(wanted, num_stages=_MATRIX_STAGES)
    room, spare = device.shared_bytes - _SPARE_BYTES, device.spare_stages
    while (wanted.num_stages - spare) * _stage_bytes(sizes, wanted, tile) > room:
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
