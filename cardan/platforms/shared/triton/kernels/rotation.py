"""Rotary position embedding of queries and keys, with or without head norms: one launch."""

import triton
import triton.language as tl

from cardan.platforms.shared.triton.kernels.dependent_launch import (
    let_next_begin,
    wait_for_constants,
    wait_for_earlier,
)
from cardan.platforms.shared.triton.launched import launched


@triton.jit
def rotated(
    heads,
    inside,
    weight,
    table,
    eps,
    kind: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    NORMED: tl.constexpr,
):
    """Heads of one token that ``heads`` [n] points at, in three parts in dtype ``kind``: the first
    HALF elements, the next HALF, and the rest, which is the first part again if REST_BLOCK is 0.

    ``table`` points at the cosines and sines of the token's position.
    """
    places = tl.arange(0, HALF_BLOCK)
    in_half = places < HALF
    mask = inside[:, None] & in_half[None, :]
    at = heads[:, None] + places[None, :]
    first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    if NORMED:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
    rest = first
    if REST_BLOCK > 0:
        others = tl.arange(0, REST_BLOCK)
        in_rest = others < DIM - 2 * HALF
        rest_mask = inside[:, None] & in_rest[None, :]
        rest_at = heads[:, None] + 2 * HALF + others[None, :]
        rest = tl.load(rest_at, mask=rest_mask, other=0.0).to(tl.float32)
        if NORMED:
            squares += tl.sum(rest * rest, 1)
    if NORMED:
        scale = tl.rsqrt(squares / DIM + eps)[:, None]
        first_weight = tl.load(weight + places, mask=in_half, other=0.0).to(tl.float32)
        second_weight = tl.load(weight + HALF + places, mask=in_half, other=0.0).to(tl.float32)
        first = first * scale * first_weight[None, :]
        second = second * scale * second_weight[None, :]
        if REST_BLOCK > 0:
            rest_weight = tl.load(weight + 2 * HALF + others, mask=in_rest, other=0.0)
            rest = rest * scale * rest_weight.to(tl.float32)[None, :]
    cos = tl.load(table + places, mask=in_half, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(table + HALF + places, mask=in_half, other=0.0).to(tl.float32)[None, :]
    turned = (first * cos - second * sin).to(kind)
    return turned, (second * cos + first * sin).to(kind), rest.to(kind)


@triton.jit
def store_parts(
    into,
    inside,
    first,
    second,
    rest,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
):
    """Put the three parts of ``rotated`` together where ``into`` [n] points."""
    places = tl.arange(0, HALF_BLOCK)
    mask = inside[:, None] & (places < HALF)[None, :]
    at = into[:, None] + places[None, :]
    tl.store(at, first, mask=mask)
    tl.store(at + HALF, second, mask=mask)
    if REST_BLOCK > 0:
        others = tl.arange(0, REST_BLOCK)
        rest_mask = inside[:, None] & (others < DIM - 2 * HALF)[None, :]
        tl.store(into[:, None] + 2 * HALF + others[None, :], rest, mask=rest_mask)


@launched
@triton.jit(do_not_specialize=["is_fixed"])
def rotate_kernel(
    q,
    k,
    out,
    q_weight,
    k_weight,
    cos_sin,
    positions,
    eps,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    table_stride,
    is_fixed,
    NUM_Q: tl.constexpr,
    NUM_K: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    NORMED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """out [T, NUM_Q + NUM_K, DIM]: the heads of q, then those of k, each normed over DIM if NORMED
    and rotated in its first 2 * HALF elements.

    A program takes HEADS heads of one token, of q or of k. The rest of a head, REST_BLOCK elements
    at most (0: none), is not rotated.
    """
    let_next_begin(OVERLAPS)
    wait_for_constants(is_fixed, OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    table = cos_sin + tl.load(positions + token).to(tl.int64) * table_stride
    wait_for_earlier(OVERLAPS)
    q_chunks: tl.constexpr = (NUM_Q + HEADS - 1) // HEADS
    is_query = chunk < q_chunks
    if is_query:
        source = q + token * q_token_stride
        head_stride = q_head_stride
        weight = q_weight
        head = chunk * HEADS + tl.arange(0, HEADS)
        inside = head < NUM_Q
        target = head
    else:
        source = k + token * k_token_stride
        head_stride = k_head_stride
        weight = k_weight
        head = (chunk - q_chunks) * HEADS + tl.arange(0, HEADS)
        inside = head < NUM_K
        target = head + NUM_Q
    heads = source + head * head_stride
    into = out + token * ((NUM_Q + NUM_K) * DIM) + target * DIM
    kind: tl.constexpr = out.dtype.element_ty
    # fmt: off
    first, second, rest = rotated(
        heads, inside, weight, table, eps, kind, DIM, HALF, HALF_BLOCK, REST_BLOCK, NORMED
    )
    # fmt: on
    store_parts(into, inside, first, second, rest, DIM, HALF, HALF_BLOCK, REST_BLOCK)
