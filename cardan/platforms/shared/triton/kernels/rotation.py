"""Rotary position embedding of queries and keys, with or without head norms: one launch."""

import triton
import triton.language as tl


@triton.jit
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
    NUM_Q: tl.constexpr,
    NUM_K: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    NORMED: tl.constexpr,
):
    """out [T, NUM_Q + NUM_K, DIM]: the heads of q, then those of k, each normed over DIM if NORMED
    and rotated in its first 2 * HALF elements.

    A program takes HEADS heads of one token, of q or of k. The rest of a head, REST_BLOCK elements
    at most (0: none), is not rotated.
    """
    token = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
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
    places = tl.arange(0, HALF_BLOCK)
    in_half = places < HALF
    mask = inside[:, None] & in_half[None, :]
    heads = source + head[:, None] * head_stride
    first = tl.load(heads + places[None, :], mask=mask, other=0.0).to(tl.float32)
    second = tl.load(heads + HALF + places[None, :], mask=mask, other=0.0).to(tl.float32)
    into = out + token * ((NUM_Q + NUM_K) * DIM) + target[:, None] * DIM
    if NORMED:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
    if REST_BLOCK > 0:
        others = tl.arange(0, REST_BLOCK)
        in_rest = others < DIM - 2 * HALF
        rest_mask = inside[:, None] & in_rest[None, :]
        rest = tl.load(heads + 2 * HALF + others[None, :], mask=rest_mask, other=0.0)
        if NORMED:
            wide = rest.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
    if NORMED:
        scale = tl.rsqrt(squares / DIM + eps)[:, None]
        first_weight = tl.load(weight + places, mask=in_half, other=0.0).to(tl.float32)
        second_weight = tl.load(weight + HALF + places, mask=in_half, other=0.0).to(tl.float32)
        first = first * scale * first_weight[None, :]
        second = second * scale * second_weight[None, :]
    table = cos_sin + tl.load(positions + token) * (2 * HALF)
    cos = tl.load(table + places, mask=in_half, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(table + HALF + places, mask=in_half, other=0.0).to(tl.float32)[None, :]
    kind = out.dtype.element_ty
    tl.store(into + places[None, :], (first * cos - second * sin).to(kind), mask=mask)
    tl.store(into + HALF + places[None, :], (second * cos + first * sin).to(kind), mask=mask)
    if REST_BLOCK > 0:
        if NORMED:
            rest_weight = tl.load(weight + 2 * HALF + others, mask=in_rest, other=0.0)
            rest = rest.to(tl.float32) * scale * rest_weight.to(tl.float32)[None, :]
        tl.store(into + 2 * HALF + others[None, :], rest.to(kind), mask=rest_mask)
