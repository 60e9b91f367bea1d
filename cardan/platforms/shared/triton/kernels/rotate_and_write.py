"""Head norms, rotation and the cache write of a layer in one launch."""

import triton
import triton.language as tl

from cardan.platforms.shared.triton.kernels.dependent_launch import (
    let_next_begin,
    wait_for_constants,
    wait_for_earlier,
)
from cardan.platforms.shared.triton.kernels.paged_cache import (
    contents_of,
    copy_heads,
    magnitudes,
    store_numbers,
    store_scale,
)
from cardan.platforms.shared.triton.kernels.rotation import rotated, store_parts
from cardan.platforms.shared.triton.launched import launched


@triton.jit
def _store_keys(
    cache,
    scales,
    at,
    inside,
    first,
    second,
    rest,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    SCALE_AT: tl.constexpr,
):
    """Store the three parts of rotated heads as contents that begin at ``at`` [heads]."""
    places = tl.arange(0, HALF_BLOCK)
    mask = inside[:, None] & (places < HALF)[None, :]
    scale = at
    if REST_BLOCK > 0:
        others = tl.arange(0, REST_BLOCK)
        rest_mask = inside[:, None] & (others < DIM - 2 * HALF)[None, :]
    if SCALE_AT >= 0:
        largest = tl.maximum(magnitudes(first, mask), magnitudes(second, mask))
        if REST_BLOCK > 0:
            largest = tl.maximum(largest, magnitudes(rest, rest_mask))
        scale = store_scale(scales, at, largest, inside, SCALE_AT)
    store_numbers(cache, at, places, first, scale, mask, SCALE_AT >= 0)
    store_numbers(cache, at + HALF, places, second, scale, mask, SCALE_AT >= 0)
    if REST_BLOCK > 0:
        store_numbers(cache, at + 2 * HALF, others, rest, scale, rest_mask, SCALE_AT >= 0)


@launched
@triton.jit(do_not_specialize=["is_fixed"])
def rotate_and_write_kernel(
    q,
    k,
    v,
    q_out,
    k_out,
    cache,
    scales,
    slot_mapping,
    q_weight,
    k_weight,
    cos_sin,
    positions,
    eps,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    is_fixed,
    BLOCK_STRIDE: tl.constexpr,
    KV_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    SCALE_AT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_Q: tl.constexpr,
    NUM_K: tl.constexpr,
    DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    V_BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    NORMED: tl.constexpr,
    KEEPS_KEYS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Program (token, HEADS heads of q, of k or of v, in this order).

    Queries go to q_out [T, NUM_Q, DIM], keys and values to the token's slot, if that is not -1.
    KEEPS_KEYS: keys also go to k_out [T, NUM_K, DIM]. Rotation as of ``rotate_kernel``, the cache
    as of ``write_kernel``.
    """
    let_next_begin(OVERLAPS)
    wait_for_constants(is_fixed, OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    q_chunks: tl.constexpr = (NUM_Q + HEADS - 1) // HEADS
    k_chunks: tl.constexpr = (NUM_K + HEADS - 1) // HEADS
    table = cos_sin + tl.load(positions + token) * (2 * HALF)
    kind: tl.constexpr = q_out.dtype.element_ty
    slot = tl.load(slot_mapping + token)
    wait_for_earlier(OVERLAPS)
    # fmt: off
    if chunk < q_chunks:
        head = chunk * HEADS + tl.arange(0, HEADS)
        heads = q + token * q_token_stride + head * q_head_stride
        first, second, rest = rotated(
            heads, head < NUM_Q, q_weight, table, eps,
            kind, DIM, HALF, HALF_BLOCK, REST_BLOCK, NORMED,
        )
        into = q_out + (token * NUM_Q + head) * DIM
        store_parts(
            into, head < NUM_Q, first, second, rest, DIM, HALF, HALF_BLOCK, REST_BLOCK
        )
    elif chunk < q_chunks + k_chunks:
        head = (chunk - q_chunks) * HEADS + tl.arange(0, HEADS)
        heads = k + token * k_token_stride + head * k_head_stride
        first, second, rest = rotated(
            heads, head < NUM_K, k_weight, table, eps,
            kind, DIM, HALF, HALF_BLOCK, REST_BLOCK, NORMED,
        )
        if KEEPS_KEYS:
            into = k_out + (token * NUM_K + head) * DIM
            store_parts(
                into, head < NUM_K, first, second, rest, DIM, HALF, HALF_BLOCK, REST_BLOCK
            )
        if slot >= 0:
            at = contents_of(slot, head, BLOCK_SIZE, BLOCK_STRIDE, HEAD_STRIDE, TOKEN_STRIDE)
            _store_keys(
                cache, scales, at, head < NUM_K, first, second, rest,
                DIM, HALF, HALF_BLOCK, REST_BLOCK, SCALE_AT,
            )
    elif slot >= 0:
        head = (chunk - q_chunks - k_chunks) * HEADS + tl.arange(0, HEADS)
        at = contents_of(slot, head, BLOCK_SIZE, BLOCK_STRIDE, HEAD_STRIDE, TOKEN_STRIDE)
        heads = v + token * v_token_stride + head * v_head_stride
        copy_heads(heads, cache, scales, at + KV_STRIDE, head, NUM_K, V_DIM, V_BLOCK, SCALE_AT)
    # fmt: on
