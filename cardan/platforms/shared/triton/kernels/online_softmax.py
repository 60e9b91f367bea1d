"""What the attention kernels share: one tile of keys and values folded into running sums.

Scores are kept in powers of two (scaled by log2 e), so that exp2 serves.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
# Below every score, and finite, so that differences of it are numbers.
LOWEST = tl.constexpr(-1.0e30)


@triton.jit
def places_of(
    table,
    keys,
    inside,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
):
    """Where the contents of positions ``keys`` begin, in elements of the cache; ``table`` points at
    the row's block ids. The null block where not ``inside``."""
    block = tl.load(table + keys // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    return block * BLOCK_STRIDE + (keys % BLOCK_SIZE) * TOKEN_STRIDE


@triton.jit
def load_tile(
    cache,
    place,
    inside,
    KV_STRIDE: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
):
    """Keys [K_BLOCK, tile] and values [tile, V_BLOCK] at ``place``, as the cache has them; 0 where
    not ``inside``. ``cache`` points at the head."""
    k_dim = tl.arange(0, K_BLOCK)
    v_dim = tl.arange(0, V_BLOCK)
    k_mask = inside[None, :]
    v_mask = inside[:, None]
    if K_BLOCK != K_DIM:
        k_mask = k_mask & (k_dim < K_DIM)[:, None]
    if V_BLOCK != V_DIM:
        v_mask = v_mask & (v_dim < V_DIM)[None, :]
    k = tl.load(cache + place[None, :] + k_dim[:, None], mask=k_mask, other=0.0)
    v = tl.load(cache + KV_STRIDE + place[:, None] + v_dim[None, :], mask=v_mask, other=0.0)
    return k, v


@triton.jit
def load_scales(scales, place, inside, KV_STRIDE: tl.constexpr, SCALE_AT: tl.constexpr):
    """What keys and values [tile] are multiples of; 0 where not ``inside``.

    ``scales`` points at the head in a cache of bytes, seen as float32. SCALE_AT counts from the
    beginning of a content; -1: the cache has no scales, and what comes back is none either.
    """
    if SCALE_AT >= 0:
        at = scales + place // 4 + SCALE_AT
        key_scales = tl.load(at, mask=inside, other=0.0)
        value_scales = tl.load(at + KV_STRIDE // 4, mask=inside, other=0.0)
    else:
        key_scales = inside
        value_scales = inside
    return key_scales, value_scales


@triton.jit
def visible(distance, window, HAS_WINDOW: tl.constexpr):
    """Which keys a query sees at a distance back from it."""
    seen = distance >= 0
    if HAS_WINDOW:
        seen = seen & (distance < window)
    return seen


@triton.jit
def scores_of(
    q,
    k,
    key_scales,
    distance,
    scale,
    cap,
    slopes,
    IS_SCALED: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
):
    """Scores [queries, tile], and the number >= 0 that makes them powers of two: ``fold``
    multiplies by it where that costs nothing. ``distance`` [queries, tile] counts from query back
    to key."""
    if IS_SCALED:
        k = k.to(tl.float32)
    scores = tl.dot(q, k.to(q.dtype), input_precision="ieee")
    if IS_SCALED:
        scores = scores * key_scales[None, :]
    factor = scale * LOG2_E
    if HAS_CAP:
        fall = tl.exp2(scores * (-2.0 * LOG2_E * scale / cap))
        scores = (2.0 / (1.0 + fall) - 1.0) * cap
        factor = scale * 0.0 + LOG2_E
    if HAS_SLOPES:
        if not HAS_CAP:
            scores = scores * scale
            factor = scale * 0.0 + LOG2_E
        scores -= slopes[:, None] * distance.to(tl.float32)
    return scores, factor


@triton.jit
def fold(
    scores,
    factor,
    seen,
    v,
    value_scales,
    top,
    total,
    out,
    kind: tl.constexpr,
    IS_SCALED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Running maximum, sum of weights, and weighted values with one more tile of scores, to be
    multiplied by ``factor``; products are of dtype ``kind``."""
    if MASKED:
        scores = tl.where(seen, scores, LOWEST)
    new_top = tl.maximum(top, tl.max(scores, 1) * factor)
    weights = tl.exp2(scores * factor - new_top[:, None])
    if MASKED:
        weights = tl.where(seen, weights, 0.0)
    fade = tl.exp2(top - new_top)
    total = total * fade + tl.sum(weights, 1)
    if IS_SCALED:
        v = v.to(tl.float32)
        if kind == tl.float16:  # weights times scales may be too small for it
            v = v * value_scales[:, None]
        else:
            weights = weights * value_scales[None, :]
    v = v.to(kind)
    out = tl.dot(weights.to(kind), v, out * fade[:, None], input_precision="ieee")
    return new_top, total, out


@triton.jit
def load_queries(
    q, token, head, is_query, token_stride, head_stride, K_DIM: tl.constexpr, K_BLOCK: tl.constexpr
):
    """Queries [rows, K_BLOCK] of each ``token`` and ``head``; 0 where not ``is_query``."""
    k_dim = tl.arange(0, K_BLOCK)
    at = q + (token * token_stride + head * head_stride)[:, None] + k_dim[None, :]
    return tl.load(at, mask=is_query[:, None] & (k_dim < K_DIM)[None, :], other=0.0)


@triton.jit
def begin_sums(sinks, slopes, head, is_query, HAS_SINKS: tl.constexpr, HAS_SLOPES: tl.constexpr):
    """Running maximum and sum before any key, which sinks are part of, and the heads' slopes."""
    top = tl.zeros_like(head).to(tl.float32) + LOWEST
    total = tl.zeros_like(head).to(tl.float32)
    slope = tl.zeros_like(head).to(tl.float32)
    if HAS_SINKS:
        top = tl.load(sinks + head, mask=is_query, other=0.0).to(tl.float32) * LOG2_E
        total = total + 1.0
    if HAS_SLOPES:
        slope = tl.load(slopes + head, mask=is_query, other=0.0).to(tl.float32)
    return top, total, slope


@triton.jit
def store_result(
    out,
    lse,
    place,
    is_query,
    top,
    total,
    acc,
    v_scale,
    V_DIM: tl.constexpr,
    V_BLOCK: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """Finish the sums of rows whose outputs lie at ``place`` [rows], counted in heads. ``v_scale``
    multiplies all values."""
    v_dim = tl.arange(0, V_BLOCK)
    into = out + (place * V_DIM)[:, None] + v_dim[None, :]
    mask = is_query[:, None] & (v_dim < V_DIM)[None, :]
    tl.store(into, (acc * (v_scale / total)[:, None]).to(out.dtype.element_ty), mask=mask)
    if HAS_LSE:
        tl.store(lse + place, (top + tl.log2(total)) / LOG2_E, mask=is_query)


@triton.jit
def layer_scale(scale, kv_head, stride, HAS_SCALE: tl.constexpr):
    """The number that all keys, or all values, of a head are multiples of."""
    if HAS_SCALE:
        found = tl.load(scale + kv_head * stride).to(tl.float32)
    else:
        found = 1.0
    return found


@triton.jit
def store_zeros(
    out, first_head, token, inside, num_heads, GROUP, V_DIM: tl.constexpr, V_BLOCK: tl.constexpr
):
    """Outputs of tokens [n] that belong to no row, for the heads of a group."""
    v_dim = tl.arange(0, V_BLOCK)
    mask = inside[:, None] & (v_dim < V_DIM)[None, :]
    zero = tl.zeros([1, 1], tl.float32).to(out.dtype.element_ty)
    for member in tl.range(0, GROUP):
        place = token * num_heads + first_head + member
        tl.store(out + (place * V_DIM)[:, None] + v_dim[None, :], zero, mask=mask)
