"""Attention of long rows whose keys and values lie side by side, in tiles that devices copy."""

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
def _spans(
    first_position,
    length,
    window,
    TILE_QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Where four spans of keys end, which begin at ``begin``, the first key that the tile's first
    query sees: whole tiles of keys that not all of its queries see, that all see, that some see,
    and what is left of the row."""
    begin = first_position * 0
    end = tl.minimum(first_position + TILE_QUERIES, length)
    if HAS_WINDOW:
        begin = tl.maximum(first_position - window + 1, 0)
    inside = tl.minimum((length - begin) // TILE, tl.cdiv(end - begin, TILE))
    inside_to = begin + inside * TILE
    seen_from = begin
    if HAS_WINDOW:
        hidden = tl.maximum(end - window - begin, 0)
        seen_from = tl.minimum(begin + tl.cdiv(hidden, TILE) * TILE, inside_to)
    seen_to = seen_from + tl.maximum(first_position + 1 - seen_from, 0) // TILE * TILE
    return begin, seen_from, seen_to, inside_to, end


@triton.jit
def _fold_tiles(
    begin,
    end,
    top,
    total,
    acc,
    queries,
    position,
    slope,
    k_tiles,
    v_tiles,
    key_start,
    kv_head,
    scale,
    cap,
    window,
    KIND: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Folds whole tiles of a row's keys, of which all queries see all unless it IS_MASKED."""
    # fmt: off
    for start in tl.range(begin, end, TILE, num_stages=STAGES):
        at = key_start + start
        k = k_tiles.load([at, kv_head * K_BLOCK]).T
        v = v_tiles.load([at, kv_head * V_BLOCK])
        keys = start + tl.arange(0, TILE)
        distance = position[:, None] - keys[None, :]
        scores, factor = scores_of(
            queries, k, keys, distance, scale, cap, slope, False, HAS_CAP, HAS_SLOPES
        )
        seen = distance
        if IS_MASKED:
            seen = visible(distance, window, HAS_WINDOW)
        top, total, acc = fold(
            scores, factor, seen, v, keys, top, total, acc, KIND, False, IS_MASKED
        )
    # fmt: on
    return top, total, acc


@triton.jit
def _fold_edge(
    begin,
    end,
    top,
    total,
    acc,
    queries,
    position,
    slope,
    k,
    v,
    k_stride,
    v_stride,
    scale,
    cap,
    window,
    KIND: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    EDGE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
):
    """Folds the last keys of a row. What lies behind them is not its own, and may be no number: it
    is not read. ``k`` and ``v`` point at the row's first key and value."""
    # fmt: off
    for start in tl.range(begin, end, EDGE, num_stages=1):
        keys = start + tl.arange(0, EDGE)
        inside = (keys < end)[:, None]
        k_at = keys[:, None].to(tl.int64) * k_stride + tl.arange(0, K_BLOCK)[None, :]
        v_at = keys[:, None].to(tl.int64) * v_stride + tl.arange(0, V_BLOCK)[None, :]
        k_tile = tl.load(k + k_at, mask=inside, other=0.0).T
        v_tile = tl.load(v + v_at, mask=inside, other=0.0)
        distance = position[:, None] - keys[None, :]
        scores, factor = scores_of(
            queries, k_tile, keys, distance, scale, cap, slope, False, HAS_CAP, HAS_SLOPES
        )
        seen = visible(distance, window, HAS_WINDOW)
        top, total, acc = fold(
            scores, factor, seen, v_tile, keys, top, total, acc, KIND, False, True
        )
    # fmt: on
    return top, total, acc


@launched
@triton.jit(
    do_not_specialize=[
        "window",
        "num_rows",
        "num_tokens",
        "first_head",
        "last_head",
        "num_heads",
    ]
)
def prefill_kernel(
    q,
    out,
    lse,
    sinks,
    slopes,
    k_scale,
    v_scale,
    k,
    v,
    k_tiles,
    v_tiles,
    key_start_loc,
    query_start_loc,
    seq_lens,
    num_rows,
    num_tokens,
    first_head,
    last_head,
    num_heads,
    scale,
    cap,
    window,
    q_token_stride,
    q_head_stride,
    k_scale_stride,
    v_scale_stride,
    k_stride,
    v_stride,
    GROUP: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    EDGE: tl.constexpr,
    STAGES: tl.constexpr,
    MASKED_STAGES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_K_SCALE: tl.constexpr,
    HAS_V_SCALE: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """Program (head of a section, tile of queries, section): one of the query heads [first_head,
    last_head), a section of them after the other. Rows with fewer than two query tokens are left
    alone, tokens below num_tokens that belong to no row get zeros.

    Keys and values of row r lie at key_start_loc[r] of [keys, key heads * BLOCK], whose copies come
    in tiles [TILE, BLOCK]; the first key head there is that of first_head.

    Tiles run backwards, all heads of a section at once: programs that take longest begin first, so
    that all cores are done at about the same time, and the section's keys stay in the cache that
    the cores share.
    """
    head = first_head + tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    if head >= last_head:
        return
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    row = row_of(tile, query_start_loc, num_rows, TILE_QUERIES)
    known_row = tl.minimum(row, num_rows - 1)
    row_start = tl.load(query_start_loc + row)
    row_end = tl.load(query_start_loc + known_row + 1)
    length = tl.load(seq_lens + known_row).to(tl.int32)
    key_start = tl.load(key_start_loc + known_row).to(tl.int32)
    number = tl.arange(0, TILE_QUERIES)
    first_query = (tile - (row_start // TILE_QUERIES + row)).to(tl.int32) * TILE_QUERIES
    token = row_start + first_query + number
    if row == num_rows:
        store_zeros(out, head, token, token < num_tokens, num_heads, 1, V_DIM, V_BLOCK)
        return
    count = (row_end - row_start).to(tl.int32)
    if (count < 2) | (first_query >= count):
        return
    first_position = length - count + first_query
    is_query = first_query + number < count
    heads = head + number * 0
    position = first_position + number
    queries = load_queries(q, token, heads, is_query, q_token_stride, q_head_stride, K_DIM, K_BLOCK)
    top, total, slope = begin_sums(sinks, slopes, heads, is_query, HAS_SINKS, HAS_SLOPES)
    acc = tl.zeros([TILE_QUERIES, V_BLOCK], tl.float32)
    kind: tl.constexpr = q.dtype.element_ty
    # fmt: off
    begin, seen_from, seen_to, inside_to, end = _spans(
        first_position, length, window, TILE_QUERIES, TILE, HAS_WINDOW
    )
    kv_head = head // GROUP
    place = kv_head - first_head // GROUP
    scale *= layer_scale(k_scale, kv_head, k_scale_stride, HAS_K_SCALE)
    if HAS_WINDOW:
        top, total, acc = _fold_tiles(
            begin, seen_from, top, total, acc, queries, position, slope, k_tiles, v_tiles,
            key_start, place, scale, cap, window, kind, K_BLOCK, V_BLOCK, TILE, 1, HAS_WINDOW,
            HAS_CAP, HAS_SLOPES, True,
        )
    top, total, acc = _fold_tiles(
        seen_to, inside_to, top, total, acc, queries, position, slope, k_tiles, v_tiles, key_start,
        place, scale, cap, window, kind, K_BLOCK, V_BLOCK, TILE, MASKED_STAGES, HAS_WINDOW, HAS_CAP,
        HAS_SLOPES, True,
    )
    row_k = k + key_start.to(tl.int64) * k_stride + place * K_BLOCK
    row_v = v + key_start.to(tl.int64) * v_stride + place * V_BLOCK
    top, total, acc = _fold_edge(
        inside_to, end, top, total, acc, queries, position, slope, row_k, row_v, k_stride, v_stride,
        scale, cap, window, kind, K_BLOCK, V_BLOCK, EDGE, HAS_WINDOW, HAS_CAP, HAS_SLOPES,
    )
    top, total, acc = _fold_tiles(
        seen_from, seen_to, top, total, acc, queries, position, slope, k_tiles, v_tiles, key_start,
        place, scale, cap, window, kind, K_BLOCK, V_BLOCK, TILE, STAGES, HAS_WINDOW, HAS_CAP,
        HAS_SLOPES, False,
    )
    # fmt: on
    by = layer_scale(v_scale, kv_head, v_scale_stride, HAS_V_SCALE)
    into = token * num_heads + head
    store_result(out, lse, into, is_query, top, total, acc, by, V_DIM, V_BLOCK, HAS_LSE)


@launched
@triton.jit(do_not_specialize=["num_rows", "first_head"])
def gather_kernel(
    cache,
    scales,
    k,
    v,
    key_start_loc,
    block_table,
    num_rows,
    first_head,
    table_stride,
    BLOCK_STRIDE: tl.constexpr,
    KV_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    SCALE_AT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (tile of keys, key head): from the pages of a row to where its keys lie side by side,
    k [keys, heads, K_BLOCK] and v [keys, heads, V_BLOCK]; the heads are those from first_head on.

    Numbers with scales are multiplied by them. Rows without room in ``key_start_loc`` are left out.
    """
    tile = tl.program_id(0)
    place = tl.program_id(1)
    row = row_of(tile, key_start_loc, num_rows, TILE)
    if row == num_rows:
        return
    start = tl.load(key_start_loc + row)
    count = tl.load(key_start_loc + row + 1) - start
    keys = ((tile - (start // TILE + row)) * TILE).to(tl.int32) + tl.arange(0, TILE)
    inside = keys < count
    head = (first_head + place).to(tl.int64)
    table = block_table + row.to(tl.int64) * table_stride
    at = places_of(table, keys, inside, BLOCK_SIZE, BLOCK_STRIDE, TOKEN_STRIDE)
    k_tile, v_tile = load_tile(
        cache + head * HEAD_STRIDE, at, inside, KV_STRIDE, K_DIM, V_DIM, K_BLOCK, V_BLOCK
    )
    if SCALE_AT >= 0:
        k_by, v_by = load_scales(scales + head * HEAD_STRIDE // 4, at, inside, KV_STRIDE, SCALE_AT)
        k_tile = k_tile.to(tl.float32) * k_by[None, :]
        v_tile = v_tile.to(tl.float32) * v_by[:, None]
    into = (start + keys) * tl.num_programs(1) + place
    k_into = k + (into * K_BLOCK)[None, :] + tl.arange(0, K_BLOCK)[:, None]
    v_into = v + (into * V_BLOCK)[:, None] + tl.arange(0, V_BLOCK)[None, :]
    tl.store(k_into, k_tile.to(k.dtype.element_ty), mask=inside[None, :])
    tl.store(v_into, v_tile.to(v.dtype.element_ty), mask=inside[:, None])
