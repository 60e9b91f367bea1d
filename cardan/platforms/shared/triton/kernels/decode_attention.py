"""Attention of rows with one query token: keys split over programs, heads of a group packed."""

import triton
import triton.language as tl

from cardan.platforms.shared.triton.kernels.dependent_launch import (
    let_next_begin,
    wait_for_constants,
    wait_for_earlier,
)
from cardan.platforms.shared.triton.kernels.online_softmax import (
    LOWEST,
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
)
from cardan.platforms.shared.triton.launched import launched


@triton.jit
def _store_spare(
    out, token, kv_head, GROUP: tl.constexpr, V_DIM: tl.constexpr, V_BLOCK: tl.constexpr
):
    """Zeros for a token that belongs to no row."""
    tokens = (token + tl.arange(0, 1)).to(tl.int64)
    num_heads = tl.num_programs(1) * GROUP
    # fmt: off
    store_zeros(
        out, kv_head * GROUP, tokens, tl.arange(0, 1) == 0, num_heads, GROUP, V_DIM, V_BLOCK
    )
    # fmt: on


@triton.jit
def _ends_of(query_start_loc, seq_lens, row, num_rows):
    """Of a row, or the last one if there are fewer: its first token and that of the row after; that
    after all rows; its length. Read at once: each would take as long as the others."""
    row = tl.minimum(row, num_rows - 1)
    rows_end = tl.load(query_start_loc + num_rows)
    token = tl.load(query_start_loc + row)
    token_end = tl.load(query_start_loc + row + 1)
    return token, token_end, rows_end, tl.load(seq_lens + row).to(tl.int32)


@triton.jit
def _part_of(length, window, split, TILE: tl.constexpr, LEAST: tl.constexpr):
    """The keys [begin, end) of a row that are this split's, and how many parts the row has."""
    first = tl.maximum(length - window, 0)
    parts = tl.minimum(tl.cdiv(length - first, LEAST), tl.num_programs(2))
    share = tl.cdiv(tl.cdiv(length - first, TILE), tl.maximum(parts, 1)) * TILE
    begin = first + split * share
    return begin, tl.minimum(begin + share, length), parts


@triton.jit
def _begin_part(
    sinks, slopes, head, is_head, split, HAS_SINKS: tl.constexpr, HAS_SLOPES: tl.constexpr
):
    """As ``begin_sums``; the first part alone counts the sinks."""
    top, total, slope = begin_sums(sinks, slopes, head, is_head, HAS_SINKS, HAS_SLOPES)
    if HAS_SINKS:
        if split > 0:
            top = tl.full(top.shape, LOWEST, tl.float32)
            total = tl.zeros(total.shape, tl.float32)
    return top, total, slope


@triton.jit
def _leave_part(
    part_out, part_sums, place, top, total, acc, PACKED: tl.constexpr, V_BLOCK: tl.constexpr
):
    """Store the sums of one part of a row's keys."""
    member = tl.arange(0, PACKED)
    v_dim = tl.arange(0, V_BLOCK)
    sums = part_sums + place * (2 * PACKED) + member
    tl.store(sums, top)
    tl.store(sums + PACKED, total)
    into = part_out + place * (PACKED * V_BLOCK) + member[:, None] * V_BLOCK + v_dim[None, :]
    tl.store(into, acc)


@triton.jit
def _settle(value, SETTLING: tl.constexpr):
    """Wait until all stores of this wave have left it. Compilers that know barriers as such of
    shared memory alone let a wave pass with stores under way, which the one that publishes them
    would not wait for. ``value`` int32 is of no matter."""
    if SETTLING != "":
        tl.inline_asm_elementwise(
            SETTLING + "\nv_mov_b32 $0, $1", "=v,v", [value], tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _add_parts(
    part_out,
    part_sums,
    place,
    parts,
    PACKED: tl.constexpr,
    V_BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The sums of all parts together, read past caches that do not know other programs' stores."""
    member = tl.arange(0, PACKED)
    v_dim = tl.arange(0, V_BLOCK)
    top = tl.full([PACKED], LOWEST, tl.float32)
    total = tl.zeros([PACKED], tl.float32)
    acc = tl.zeros([PACKED, V_BLOCK], tl.float32)
    for part in tl.range(0, parts, num_stages=STAGES):
        sums = part_sums + (place + part) * (2 * PACKED) + member
        part_top = tl.load(sums, cache_modifier=".cg")
        part_total = tl.load(sums + PACKED, cache_modifier=".cg")
        at = part_out + (place + part) * (PACKED * V_BLOCK) + member[:, None] * V_BLOCK
        part_acc = tl.load(at + v_dim[None, :], cache_modifier=".cg")
        new_top = tl.maximum(top, part_top)
        fade = tl.exp2(top - new_top)
        weight = tl.exp2(part_top - new_top)
        total = total * fade + part_total * weight
        acc = acc * fade[:, None] + part_acc * weight[:, None]
        top = new_top
    return top, total, acc


@launched
@triton.jit(do_not_specialize=["window", "num_rows", "num_tokens", "is_fixed"])
def decode_kernel(
    q,
    cache,
    out,
    lse,
    sinks,
    slopes,
    scales,
    k_scale,
    v_scale,
    part_out,
    part_sums,
    arrived,
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
    is_fixed,
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
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    LEAST: tl.constexpr,
    SETTLING: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_K_SCALE: tl.constexpr,
    HAS_V_SCALE: tl.constexpr,
    HAS_LSE: tl.constexpr,
    OVERLAPS: tl.constexpr,
    IS_SHORT: tl.constexpr,
):
    """Program (row, key head, split): one part of the keys of a row with one query token; other
    rows are left alone. A row is cut into as many parts of at least LEAST keys as it has, at most
    one for each split; IS_SPLIT says that there are several.

    PACKED >= 16 holds the GROUP query heads of a key head. With several parts each leaves its sums
    in part_out [row, key head, split, PACKED, V_BLOCK] and part_sums [row, key head, split, 2,
    PACKED] (largest score, sum of weights), float32; the last one to arrive adds them up.
    arrived [row, key head] int32 counts them and is 0 again afterwards. So the order in which a row
    is summed up depends on the number of splits, which follows the size of the step.

    A program whose number is that of a token below num_tokens that belongs to no row stores zeros
    for it; there may be more programs than rows for that.

    SETTLING: as of ``Target``.

    IS_SHORT: the next kernel may begin at once, else when the keys are read.
    """
    let_next_begin(OVERLAPS and IS_SHORT)
    wait_for_constants(is_fixed, OVERLAPS)
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    token, token_end, rows_end, length = _ends_of(query_start_loc, seq_lens, row, num_rows)
    wait_for_earlier(OVERLAPS)
    if (row < num_tokens) & (row >= rows_end) & (split == 0):
        _store_spare(out, row, kv_head, GROUP, V_DIM, V_BLOCK)
    if (row >= num_rows) | (token_end - token != 1):
        return
    begin, end, parts = _part_of(length, window, split, TILE, LEAST)
    if split >= parts:
        return

    member = tl.arange(0, PACKED)
    is_head = member < GROUP
    head = kv_head * GROUP + member
    here = tl.zeros_like(head).to(tl.int64) + token
    queries = load_queries(q, here, head, is_head, q_token_stride, q_head_stride, K_DIM, K_BLOCK)
    top, total, slope = _begin_part(sinks, slopes, head, is_head, split, HAS_SINKS, HAS_SLOPES)
    acc = tl.zeros([PACKED, V_BLOCK], tl.float32)
    table = block_table + row.to(tl.int64) * table_stride
    head_cache = cache + kv_head.to(tl.int64) * HEAD_STRIDE
    head_scales = scales + kv_head.to(tl.int64) * HEAD_STRIDE // 4
    scale *= layer_scale(k_scale, kv_head, k_scale_stride, HAS_K_SCALE)
    # fmt: off
    for start in tl.range(begin, end, TILE, num_stages=STAGES):
        keys = start + tl.arange(0, TILE)
        inside = keys < end
        place = places_of(table, keys, inside, BLOCK_SIZE, BLOCK_STRIDE, TOKEN_STRIDE)
        k, v = load_tile(head_cache, place, inside, KV_STRIDE, K_DIM, V_DIM, K_BLOCK, V_BLOCK)
        key_scales, value_scales = load_scales(head_scales, place, inside, KV_STRIDE, SCALE_AT)
        distance = (length - 1 - keys)[None, :]
        scores, factor = scores_of(
            queries, k, key_scales, distance, scale, cap, slope, SCALE_AT >= 0, HAS_CAP, HAS_SLOPES
        )
        kind: tl.constexpr = q.dtype.element_ty
        top, total, acc = fold(
            scores, factor, inside[None, :], v, value_scales, top, total, acc, kind,
            SCALE_AT >= 0, True,
        )
    # fmt: on
    let_next_begin(OVERLAPS)

    if IS_SPLIT:
        if parts > 1:
            counter = row * tl.num_programs(1) + kv_head
            place = counter.to(tl.int64) * tl.num_programs(2)
            _leave_part(part_out, part_sums, place + split, top, total, acc, PACKED, V_BLOCK)
            _settle(member, SETTLING)
            tl.debug_barrier()
            if tl.atomic_add(arrived + counter, 1, sem="acq_rel") != parts - 1:
                return
            tl.store(arrived + counter, 0)
            top, total, acc = _add_parts(part_out, part_sums, place, parts, PACKED, V_BLOCK, STAGES)
    place = token * tl.num_programs(1) * GROUP + head
    by = layer_scale(v_scale, kv_head, v_scale_stride, HAS_V_SCALE)
    store_result(out, lse, place, is_head, top, total, acc, by, V_DIM, V_BLOCK, HAS_LSE)
