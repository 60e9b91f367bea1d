"""Writing keys and values into a paged cache, in the form that its dtype has."""

import triton
import triton.language as tl

from cardan.platforms.shared.triton.launched import launched

# The largest number of float8_e4m3, and of int8 with scales.
_LARGEST_FLOAT8 = tl.constexpr(448.0)
_LARGEST_INT8 = tl.constexpr(127.0)
# Added to a small number and taken away again, it rounds that to a whole one, ties to even.
_ROUNDER = tl.constexpr(12582912.0)


@triton.jit
def magnitudes(values, mask):
    """The largest absolute value of each head, as the bits of a float32; NaN is above all."""
    bits = values.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(tl.where(mask, bits, 0), 1)


@triton.jit
def store_scale(scales, at, largest, inside, SCALE_AT: tl.constexpr):
    """Store and return the scales [heads] of contents that begin at bytes ``at``; ``scales`` is the
    cache seen as float32."""
    largest = largest.to(tl.float32, bitcast=True)
    scale = tl.div_rn(largest, tl.full(largest.shape, _LARGEST_INT8, tl.float32))
    tl.store(scales + at // 4 + SCALE_AT, scale, mask=inside)
    return scale


@triton.jit
def store_numbers(cache, at, dim, values, scale, mask, IS_SCALED: tl.constexpr):
    """Store ``values`` [heads, dims] as elements ``dim`` of contents that begin at ``at`` [heads].

    With scales they become whole numbers of these; those that a float8 cannot hold become the
    largest that it can, NaN stays.
    """
    kind: tl.constexpr = cache.dtype.element_ty
    if IS_SCALED:
        wide = values.to(tl.float32)
        by = tl.broadcast_to(scale[:, None], wide.shape)
        whole = tl.where(by > 0, tl.div_rn(wide, by), 0.0)
        whole = tl.where(whole == whole, whole, 0.0)
        whole = tl.minimum(tl.maximum(whole, -_LARGEST_INT8), _LARGEST_INT8)
        values = (whole + _ROUNDER) - _ROUNDER
    elif kind == tl.float8e4nv:
        wide = values.to(tl.float32)
        wide = tl.where(wide > _LARGEST_FLOAT8, _LARGEST_FLOAT8, wide)
        values = tl.where(wide < -_LARGEST_FLOAT8, -_LARGEST_FLOAT8, wide)
    into = cache + at[:, None] + dim[None, :]
    tl.store(into, values.to(kind), mask=mask)


@triton.jit
def copy_heads(
    source, cache, scales, at, head, NUM_HEADS, DIM, DIMS: tl.constexpr, SCALE_AT: tl.constexpr
):
    """Store heads of a token as contents that begin at ``at`` [heads]; ``source`` [heads] points at
    them. DIMS is the power of two that holds DIM."""
    dim = tl.arange(0, DIMS)
    inside = head < NUM_HEADS
    mask = inside[:, None] & (dim < DIM)[None, :]
    values = tl.load(source[:, None] + dim[None, :], mask=mask, other=0.0)
    scale = at
    if SCALE_AT >= 0:
        scale = store_scale(scales, at, magnitudes(values, mask), inside, SCALE_AT)
    store_numbers(cache, at, dim, values, scale, mask, SCALE_AT >= 0)


@triton.jit
def contents_of(
    slot,
    head,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
):
    """Where the contents of the keys of ``head`` [heads] in a slot begin, in elements."""
    place = (slot // BLOCK_SIZE) * BLOCK_STRIDE + (slot % BLOCK_SIZE) * TOKEN_STRIDE
    return place + head.to(tl.int64) * HEAD_STRIDE


@launched
@triton.jit
def write_kernel(
    k,
    v,
    cache,
    scales,
    slot_mapping,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    BLOCK_STRIDE: tl.constexpr,
    KV_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    SCALE_AT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    DIMS: tl.constexpr,
):
    """One program a token: its heads of k and v go to its slot; a token with slot -1 goes nowhere.

    HEADS and DIMS are the powers of two that hold NUM_HEADS and the larger head dim. SCALE_AT: as
    of ``load_scales``.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    head = tl.arange(0, HEADS)
    at = contents_of(slot, head, BLOCK_SIZE, BLOCK_STRIDE, HEAD_STRIDE, TOKEN_STRIDE)
    keys = k + token * k_token_stride + head * k_head_stride
    copy_heads(keys, cache, scales, at, head, NUM_HEADS, K_DIM, DIMS, SCALE_AT)
    values = v + token * v_token_stride + head * v_head_stride
    copy_heads(values, cache, scales, at + KV_STRIDE, head, NUM_HEADS, V_DIM, DIMS, SCALE_AT)
