"""Attention of rows with several query tokens: tiles of queries, heads of a group packed."""

import triton
import triton.language as tl

from cardan.platforms.shared.triton.kernels.online_softmax import (
    begin_sums,
    fold,
    layer_scale,
    load_queries,
    load_scales,
    load_tile,
    places_of,
    scores_of,
    store_result,
    store_zeros,
    visible,
)
from cardan.platforms.shared.triton.kernels.rows_of_tiles import row_of
from cardan.platforms.shared.triton.launched import launched


@triton.jit
def _span(first_position, window, TILE: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """The first key that a tile's first query sees, and the end of the whole tiles of keys that
    all of its queries see."""
    begin = first_position * 0
    seen_by_all = (first_position + 1) // TILE * TILE
    if HAS_WINDOW:
        begin = tl.maximum(first_position - window + 1, 0)
        seen_by_all = begin
    return begin, seen_by_all


@triton.jit
def _fold_span(
    begin,
    end,
    top,
    total,
    acc,
    queries,
    position,
    slope,
    head_cache,
    head_scales,
    table,
    scale,
    cap,
    window,
    KIND: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    KV_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    SCALE_AT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Folds the keys [begin, end) of a tile's row into its sums: whole tiles of keys that all of
    its queries see, or, masked, any."""
    is_scaled: tl.constexpr = SCALE_AT >= 0
    # fmt: off
    for start in tl.range(begin, end, TILE, num_stages=STAGES):
        keys = start + tl.arange(0, TILE)
        inside = tl.full([TILE], 1, tl.int1)
        if IS_MASKED:
            inside = keys < end
        place = places_of(table, keys, inside, BLOCK_SIZE, BLOCK_STRIDE, TOKEN_STRIDE)
        k, v = load_tile(head_cache, place, inside, KV_STRIDE, K_DIM, V_DIM, K_BLOCK, V_BLOCK)
        k_by, v_by = load_scales(head_scales, place, inside, KV_STRIDE, SCALE_AT)
        distance = position[:, None] - keys[None, :]
        scores, factor = scores_of(
            queries, k, k_by, distance, scale, cap, slope, is_scaled, HAS_CAP, HAS_SLOPES
        )
        seen = distance
        if IS_MASKED:
            seen = visible(distance, window, HAS_WINDOW)
        top, total, acc = fold(
            scores, factor, seen, v, v_by, top, total, acc, KIND, is_scaled, IS_MASKED
        )
    # fmt: on
    return top, total, acc


@launched
@triton.jit(do_not_specialize=["window", "num_rows", "num_tokens"])
def ragged_kernel(
    q,
    cache,
    out,
    lse,
    sinks,
    slopes,
    scales,
    k_scale,
    v_scale,
    query_start_loc,
    seq_lens,
    block_table,
    num_rows,
    num_tokens,
    scale,
    cap,
    window,
    q_token_stride,
    q_head_stride,
    table_stride,
    k_scale_stride,
    v_scale_stride,
    BLOCK_STRIDE: tl.constexpr,
    KV_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    SCALE_AT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    PACKED: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_K_SCALE: tl.constexpr,
    HAS_V_SCALE: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """Program (tile of queries, key head). Rows with fewer than two query tokens are left alone,
    tokens below num_tokens that belong to no row get zeros.

    A tile is TILE_QUERIES query tokens of one row times PACKED heads (the power of two that holds
    the GROUP query heads of the key head). Tiles run backwards: the longest begin first.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    row = row_of(tile, query_start_loc, num_rows, TILE_QUERIES)
    row_start = tl.load(query_start_loc + row)
    if row == num_rows:
        spare = row_start + (tile - (row_start // TILE_QUERIES + row)) * TILE_QUERIES
        spare += tl.arange(0, TILE_QUERIES)
        # fmt: off
        store_zeros(
            out, kv_head * GROUP, spare, spare < num_tokens, tl.num_programs(1) * GROUP,
            GROUP, V_DIM, V_BLOCK,
        )
        # fmt: on
        return
    count = (tl.load(query_start_loc + row + 1) - row_start).to(tl.int32)
    first_query = (tile - (row_start // TILE_QUERIES + row)).to(tl.int32) * TILE_QUERIES
    if (count < 2) | (first_query >= count):
        return
    length = tl.load(seq_lens + row).to(tl.int32)
    first_position = length - count + first_query

    member = tl.arange(0, TILE_QUERIES * PACKED)
    query = member // PACKED
    is_query = (first_query + query < count) & (member % PACKED < GROUP)
    token = row_start + first_query + query
    head = kv_head * GROUP + member % PACKED
    position = first_position + query
    queries = load_queries(q, token, head, is_query, q_token_stride, q_head_stride, K_DIM, K_BLOCK)
    top, total, slope = begin_sums(sinks, slopes, head, is_query, HAS_SINKS, HAS_SLOPES)
    acc = tl.zeros([TILE_QUERIES * PACKED, V_BLOCK], tl.float32)
    kind: tl.constexpr = q.dtype.element_ty
    begin, seen_by_all = _span(first_position, window, TILE, HAS_WINDOW)
    end = tl.minimum(first_position + TILE_QUERIES, length)
    table = block_table + row.to(tl.int64) * table_stride
    head_cache = cache + kv_head.to(tl.int64) * HEAD_STRIDE
    head_scales = scales + kv_head.to(tl.int64) * HEAD_STRIDE // 4
    scale *= layer_scale(k_scale, kv_head, k_scale_stride, HAS_K_SCALE)
    # fmt: off
    top, total, acc = _fold_span(
        begin, seen_by_all, top, total, acc, queries, position, slope, head_cache, head_scales,
        table, scale, cap, window, kind, BLOCK_STRIDE, KV_STRIDE, TOKEN_STRIDE, SCALE_AT,
        BLOCK_SIZE, K_DIM, V_DIM, K_BLOCK, V_BLOCK, TILE, STAGES, HAS_WINDOW, HAS_CAP, HAS_SLOPES,
        False,
    )
    top, total, acc = _fold_span(
        seen_by_all, end, top, total, acc, queries, position, slope, head_cache, head_scales,
        table, scale, cap, window, kind, BLOCK_STRIDE, KV_STRIDE, TOKEN_STRIDE, SCALE_AT,
        BLOCK_SIZE, K_DIM, V_DIM, K_BLOCK, V_BLOCK, TILE, 1, HAS_WINDOW, HAS_CAP, HAS_SLOPES, True,
    )
    # fmt: on
    place = token * tl.num_programs(1) * GROUP + head
    by = layer_scale(v_scale, kv_head, v_scale_stride, HAS_V_SCALE)
    store_result(out, lse, place, is_query, top, total, acc, by, V_DIM, V_BLOCK, HAS_LSE)
