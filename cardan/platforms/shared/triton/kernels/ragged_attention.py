"""Attention of rows with several query tokens: tiles of queries, heads of a group packed."""

import triton
import triton.language as tl

from cardan.platforms.shared.triton.kernels.online_softmax import (
    begin_sums,
    fold,
    load_queries,
    load_tile,
    scores_of,
    store_result,
)


@triton.jit
def _row_of(tile, query_start_loc, num_rows, TILE_QUERIES: tl.constexpr):
    """The row that a tile belongs to. Row r's tiles begin at start // TILE_QUERIES + r, which
    leaves room for the part of a tile at the end of each row before it."""
    low = 0
    high = num_rows
    while low < high:
        middle = (low + high) // 2
        first_tile = tl.load(query_start_loc + middle) // TILE_QUERIES + middle
        if first_tile <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


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
def _visible(distance, window, HAS_WINDOW: tl.constexpr):
    visible = distance >= 0
    if HAS_WINDOW:
        visible = visible & (distance < window)
    return visible


@triton.jit
def _load_step_tile(
    step_k,
    step_v,
    token,
    inside,
    kv_head,
    k_stride,
    v_stride,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
):
    """As ``load_tile``, of the step's own keys and values at ``token`` [tile]."""
    k_at = token[:, None] * k_stride + kv_head * K_DIM + tl.arange(0, K_DIM)[None, :]
    v_at = token[:, None] * v_stride + kv_head * V_DIM + tl.arange(0, V_DIM)[None, :]
    k = tl.load(step_k + k_at, mask=inside[:, None], other=0.0)
    return k.T, tl.load(step_v + v_at, mask=inside[:, None], other=0.0)


@triton.jit(do_not_specialize=["window", "num_rows"])
def ragged_kernel(
    q,
    cache,
    out,
    lse,
    sinks,
    slopes,
    step_k,
    step_v,
    step_k_tiles,
    step_v_tiles,
    query_start_loc,
    seq_lens,
    block_table,
    num_rows,
    scale,
    cap,
    window,
    q_token_stride,
    q_head_stride,
    block_stride,
    kv_stride,
    head_stride,
    token_stride,
    table_stride,
    step_k_stride,
    step_v_stride,
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
    HAS_LSE: tl.constexpr,
    IS_FRESH: tl.constexpr,
):
    """Program (tile of queries, key head). Rows with fewer than two query tokens are left alone.

    IS_FRESH: these rows have no earlier keys, so that keys and values are read where the step made
    them: step_k and step_v [T, key heads, dim], and descriptors of [T, key heads * dim] for
    copies of whole tiles, [TILE, dim]. A tile that reaches past the tile's last query is read
    without them: what lies behind a row is not its own.

    A tile is TILE_QUERIES query tokens of one row times PACKED heads (the power of two that holds
    the GROUP query heads of the key head). Tiles run backwards: the longest begin first.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    row = _row_of(tile, query_start_loc, num_rows, TILE_QUERIES)
    row_start = tl.load(query_start_loc + row)
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
    head_cache = cache + kv_head * head_stride
    everything = tl.full([TILE], 1, tl.int1)
    # fmt: off
    for start in tl.range(begin, seen_by_all, TILE, num_stages=STAGES):
        keys = start + tl.arange(0, TILE)
        if IS_FRESH:
            at = row_start.to(tl.int32) + start
            k = step_k_tiles.load([at, kv_head * K_DIM]).T
            v = step_v_tiles.load([at, kv_head * V_DIM])
        else:
            k, v = load_tile(
                head_cache, table, keys, everything, block_stride, kv_stride, token_stride,
                BLOCK_SIZE, K_DIM, V_DIM, K_BLOCK, V_BLOCK,
            )
        distance = position[:, None] - keys[None, :]
        scores = scores_of(queries, k, distance, scale, cap, slope, HAS_CAP, HAS_SLOPES)
        top, total, acc = fold(scores, distance, v, top, total, acc, kind, False)
    for start in tl.range(seen_by_all, end, TILE, num_stages=1):
        keys = start + tl.arange(0, TILE)
        if IS_FRESH:
            k, v = _load_step_tile(
                step_k, step_v, row_start + keys, keys < end, kv_head,
                step_k_stride, step_v_stride, K_DIM, V_DIM,
            )
        else:
            k, v = load_tile(
                head_cache, table, keys, keys < end, block_stride, kv_stride, token_stride,
                BLOCK_SIZE, K_DIM, V_DIM, K_BLOCK, V_BLOCK,
            )
        distance = position[:, None] - keys[None, :]
        visible = _visible(distance, window, HAS_WINDOW)
        scores = scores_of(queries, k, distance, scale, cap, slope, HAS_CAP, HAS_SLOPES)
        top, total, acc = fold(scores, visible, v, top, total, acc, kind, True)
    # fmt: on
    place = token * tl.num_programs(1) * GROUP + head
    store_result(out, lse, place, is_query, top, total, acc, V_DIM, V_BLOCK, HAS_LSE)
