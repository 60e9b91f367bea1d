"""Attention of rows with one query token: keys split over programs, heads of a group packed."""

import triton
import triton.language as tl

from cardan.platforms.shared.triton.kernels.online_softmax import (
    LOWEST,
    begin_sums,
    fold,
    load_queries,
    load_tile,
    scores_of,
    store_result,
)


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


@triton.jit(do_not_specialize=["window"])
def decode_kernel(
    q,
    cache,
    out,
    lse,
    sinks,
    slopes,
    part_out,
    part_sums,
    arrived,
    query_start_loc,
    seq_lens,
    block_table,
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
    HAS_CAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """Program (row, key head, split): one part of the keys of a row with one query token; other
    rows are left alone. A row is cut into as many parts of at least LEAST keys as it has, at most
    one for each split; IS_SPLIT says that there are several.

    PACKED >= 16 holds the GROUP query heads of a key head. With several parts each leaves its sums
    in part_out [row, key head, split, PACKED, V_BLOCK] and part_sums [row, key head, split, 2,
    PACKED] (largest score, sum of weights), float32; the last one to arrive adds them up.
    arrived [row, key head] int32 counts them and is 0 again afterwards.
    """
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    token = tl.load(query_start_loc + row)
    if tl.load(query_start_loc + row + 1) - token != 1:
        return
    length = tl.load(seq_lens + row).to(tl.int32)
    first = tl.maximum(length - window, 0)
    parts = tl.minimum(tl.cdiv(length - first, LEAST), tl.num_programs(2))
    if split >= parts:
        return
    share = tl.cdiv(tl.cdiv(length - first, TILE), parts) * TILE
    begin = first + split * share
    end = tl.minimum(begin + share, length)

    member = tl.arange(0, PACKED)
    is_head = member < GROUP
    head = kv_head * GROUP + member
    here = tl.zeros_like(head).to(tl.int64) + token
    queries = load_queries(q, here, head, is_head, q_token_stride, q_head_stride, K_DIM, K_BLOCK)
    top, total, slope = begin_sums(sinks, slopes, head, is_head, HAS_SINKS, HAS_SLOPES)
    if HAS_SINKS:
        if split > 0:  # the first part alone counts them
            top = tl.full([PACKED], LOWEST, tl.float32)
            total = tl.zeros([PACKED], tl.float32)
    acc = tl.zeros([PACKED, V_BLOCK], tl.float32)
    table = block_table + row.to(tl.int64) * table_stride
    head_cache = cache + kv_head * head_stride
    for start in tl.range(begin, end, TILE, num_stages=STAGES):
        keys = start + tl.arange(0, TILE)
        inside = keys < end
        # fmt: off
        k, v = load_tile(
            head_cache, table, keys, inside, block_stride, kv_stride, token_stride,
            BLOCK_SIZE, K_DIM, V_DIM, K_BLOCK, V_BLOCK,
        )
        # fmt: on
        distance = (length - 1 - keys)[None, :]
        scores = scores_of(queries, k, distance, scale, cap, slope, HAS_CAP, HAS_SLOPES)
        kind: tl.constexpr = q.dtype.element_ty
        top, total, acc = fold(scores, inside[None, :], v, top, total, acc, kind, True)

    if IS_SPLIT:
        if parts > 1:
            counter = row * tl.num_programs(1) + kv_head
            place = counter.to(tl.int64) * tl.num_programs(2)
            _leave_part(part_out, part_sums, place + split, top, total, acc, PACKED, V_BLOCK)
            tl.debug_barrier()
            if tl.atomic_add(arrived + counter, 1, sem="acq_rel") != parts - 1:
                return
            tl.store(arrived + counter, 0)
            top, total, acc = _add_parts(part_out, part_sums, place, parts, PACKED, V_BLOCK, STAGES)
    place = token * tl.num_programs(1) * GROUP + head
    store_result(out, lse, place, is_head, top, total, acc, V_DIM, V_BLOCK, HAS_LSE)
