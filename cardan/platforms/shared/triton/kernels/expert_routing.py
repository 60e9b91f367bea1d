"""Which experts tokens go to, and the tokens of each expert, in tiles. Nothing waits for the
device: how much there is at most follows from the sizes alone."""

import triton
import triton.language as tl

from cardan.platforms.shared.triton.kernels.greedy import order_key

_NOTHING = tl.constexpr(-0x7FFFFFFFFFFFFFFF)


@triton.jit
def route_kernel(
    logits,
    ids,
    weights,
    row_stride,
    num_experts,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    PLACES: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):
    """ids [rows, TOP_K] int32 of the largest logits, the lowest id first of equal ones, and their
    softmax weights, float32. A program takes a row."""
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    inside = expert < num_experts
    values = tl.load(logits + row * row_stride + expert, mask=inside, other=float("-inf"))
    values = values.to(tl.float32)
    packed = (order_key(values).to(tl.int64) << 32) | (0x7FFFFFFF - expert)
    packed = tl.where(inside, packed, _NOTHING)
    place = tl.arange(0, PLACES)
    chosen = tl.zeros([PLACES], tl.int32)
    found = tl.full([PLACES], float("-inf"), tl.float32)
    for turn in range(TOP_K):
        best = tl.max(packed, 0)
        chosen_id = (0x7FFFFFFF - (best & 0x7FFFFFFF)).to(tl.int32)
        key = (best >> 32).to(tl.int32)
        value = tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)
        chosen = tl.where(place == turn, chosen_id, chosen)
        found = tl.where(place == turn, value, found)
        packed = tl.where(expert == chosen_id, _NOTHING, packed)
    largest = tl.max(found, 0)
    shares = tl.exp(found - largest)
    if RENORMALIZE:
        total = tl.sum(shares, 0)
    else:
        total = tl.sum(tl.exp(values - largest), 0)
    is_place = place < TOP_K
    tl.store(ids + row * TOP_K + place, chosen, mask=is_place)
    tl.store(weights + row * TOP_K + place, shares / total, mask=is_place)


@triton.jit(do_not_specialize=["num_pairs"])
def count_kernel(ids, counts, num_pairs, BLOCK: tl.constexpr):
    """counts [experts] int32: how often each expert is in ids [num_pairs]. A program takes an
    expert."""
    expert = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    found = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_pairs, BLOCK):
        here = tl.load(ids + start + place, mask=start + place < num_pairs, other=-1)
        found += (here == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(found, 0))


@triton.jit(do_not_specialize=["num_pairs", "most_tiles"])
def place_kernel(
    ids,
    counts,
    pairs,
    tile_experts,
    num_pairs,
    num_experts,
    most_tiles,
    TILE: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """pairs [most_tiles, TILE] int32: places in ids, experts one after the other, each from the
    start of a tile on and filled up with num_pairs. tile_experts [most_tiles + 1] int32: the
    expert of each tile, and last the number of tiles. A program takes an expert."""
    expert = tl.program_id(0)
    every = tl.arange(0, EXPERTS)
    tiles = (tl.load(counts + every, mask=every < num_experts, other=0) + TILE - 1) // TILE
    first = tl.sum(tl.where(every < expert, tiles, 0), 0)
    own = tl.sum(tl.where(every == expert, tiles, 0), 0)
    if expert == 0:
        tl.store(tile_experts + most_tiles, tl.sum(tiles, 0))
    for tile in range(own):
        tl.store(tile_experts + first + tile, expert)
    into = pairs + first * TILE
    place = tl.arange(0, BLOCK)
    done = first * 0
    for start in range(0, num_pairs, BLOCK):
        here = tl.load(ids + start + place, mask=start + place < num_pairs, other=-1)
        is_own = (here == expert).to(tl.int32)
        rank = tl.cumsum(is_own, 0) - 1
        tl.store(into + done + rank, start + place, mask=is_own == 1)
        done += tl.sum(is_own, 0)
    slot = tl.arange(0, TILE)
    tl.store(into + done + slot, slot * 0 + num_pairs, mask=done + slot < own * TILE)
