"""Which experts tokens go to, and the tokens of each expert, in tiles. Nothing waits for the
device: how much there is at most follows from the sizes alone."""

import triton
import triton.language as tl

from cardan.platforms.shared.triton.kernels.dependent_launch import (
    let_next_begin,
    wait_for_earlier,
)
from cardan.platforms.shared.triton.kernels.greedy import key_value, order_key
from cardan.platforms.shared.triton.launched import launched

# Below the key of every number.
_NOTHING = tl.constexpr(-0x80000000)


@launched
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
    OVERLAPS: tl.constexpr,
):
    """ids [rows, TOP_K] int32 of the largest logits, the lowest id first of equal ones, and their
    softmax weights, float32. A program of one warp, which finds the largest of 32 bits in one
    instruction, takes a row."""
    let_next_begin(OVERLAPS)
    wait_for_earlier(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    inside = expert < num_experts
    values = tl.load(logits + row * row_stride + expert, mask=inside, other=float("-inf"))
    values = values.to(tl.float32)
    keys = tl.where(inside, order_key(values), _NOTHING)
    place = tl.arange(0, PLACES)
    chosen = tl.zeros([PLACES], tl.int32)
    found = tl.full([PLACES], float("-inf"), tl.float32)
    for turn in range(TOP_K):
        best = tl.max(keys, 0)
        chosen_id = tl.min(tl.where(keys == best, expert, EXPERTS), 0)
        chosen = tl.where(place == turn, chosen_id, chosen)
        found = tl.where(place == turn, key_value(best), found)
        keys = tl.where(expert == chosen_id, _NOTHING, keys)
    largest = tl.max(found, 0)
    shares = tl.exp(found - largest)
    if RENORMALIZE:
        total = tl.sum(shares, 0)
    else:
        total = tl.sum(tl.exp(values - largest), 0)
    is_place = place < TOP_K
    tl.store(ids + row * TOP_K + place, chosen, mask=is_place)
    tl.store(weights + row * TOP_K + place, shares / total, mask=is_place)


@triton.jit
def _count(ids, start, num_pairs, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """How often each expert is in BLOCK ids from ``start`` on."""
    place = start + tl.arange(0, BLOCK)
    here = tl.load(ids + place, mask=place < num_pairs, other=0)
    # Places past the end count for the first expert.
    past = tl.maximum(start + BLOCK - num_pairs, 0)
    return tl.histogram(here, EXPERTS) - tl.where(tl.arange(0, EXPERTS) == 0, past, 0)


@launched
@triton.jit(do_not_specialize=["num_pairs"])
def count_kernel(ids, counts, num_pairs, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """counts [chunks, EXPERTS] int32: how often each expert is in each BLOCK of ids [num_pairs]. A
    program takes a chunk."""
    chunk = tl.program_id(0)
    numbers = _count(ids, chunk * BLOCK, num_pairs, EXPERTS, BLOCK)
    tl.store(counts + chunk * EXPERTS + tl.arange(0, EXPERTS), numbers)


@triton.jit
def _add_up_counts(counts, chunk, num_chunks, EXPERTS: tl.constexpr, CHUNKS: tl.constexpr):
    """Pairs of each expert [EXPERTS], and how many of them are before a chunk."""
    every = tl.arange(0, EXPERTS)[None, :]
    total = tl.zeros([EXPERTS], tl.int32)
    before = tl.zeros([EXPERTS], tl.int32)
    for start in range(0, num_chunks, CHUNKS):
        other = (start + tl.arange(0, CHUNKS))[:, None]
        part = tl.load(counts + other * EXPERTS + every, mask=other < num_chunks, other=0)
        total += tl.sum(part, 0)
        before += tl.sum(tl.where(other < chunk, part, 0), 0)
    return total, before


@launched
@triton.jit(do_not_specialize=["num_pairs", "num_chunks", "most_tiles"])
def place_kernel(
    ids,
    counts,
    pairs,
    tile_experts,
    num_pairs,
    num_chunks,
    most_tiles,
    IS_COUNTED: tl.constexpr,
    TILE: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """pairs [most_tiles, TILE] int32: places in ids, experts one after the other, each from the
    start of a tile on and filled up with num_pairs. tile_experts [most_tiles + 1] int32: the
    expert of each tile, and last the number of tiles. Program (expert, chunk of ids). IS_COUNTED:
    ``counts`` are ``count_kernel``'s; else there is one chunk, in which each program counts for
    itself, as that is faster than one more launch."""
    let_next_begin(OVERLAPS)
    wait_for_earlier(OVERLAPS)
    expert = tl.program_id(0)
    chunk = tl.program_id(1)
    every = tl.arange(0, EXPERTS)
    if IS_COUNTED:
        total, before = _add_up_counts(counts, chunk, num_chunks, EXPERTS, 8)
        done = tl.sum(tl.where(every == expert, before, 0), 0)
    else:
        total = _count(ids, 0, num_pairs, EXPERTS, BLOCK)
        done = 0
    tiles = (total + TILE - 1) // TILE
    first = tl.sum(tl.where(every < expert, tiles, 0), 0)
    own = tl.sum(tl.where(every == expert, tiles, 0), 0)
    if chunk == 0:
        if expert == 0:
            tl.store(tile_experts + most_tiles, tl.sum(tiles, 0))
        for tile in range(own):
            tl.store(tile_experts + first + tile, expert)
    place = chunk * BLOCK + tl.arange(0, BLOCK)
    is_own = (tl.load(ids + place, mask=place < num_pairs, other=-1) == expert).to(tl.int32)
    into = pairs + first * TILE + done
    tl.store(into + tl.cumsum(is_own, 0) - 1, place, mask=is_own == 1)
    if chunk == num_chunks - 1:
        # Less than a tile is left.
        slot = done + tl.sum(is_own, 0) + tl.arange(0, TILE)
        tl.store(pairs + first * TILE + slot, slot * 0 + num_pairs, mask=slot < own * TILE)
