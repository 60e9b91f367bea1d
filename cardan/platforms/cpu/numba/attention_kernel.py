"""Paged attention compiled by numba: an online softmax over tiles of keys, in float32."""

import math
from typing import Any

import numpy as np
from numba import prange

from cardan.platforms.cpu.numba.arithmetic import exponential, widen_half
from cardan.platforms.cpu.numba.compiler import array_at, kernel, parallel_kernel, part_of_kernel

# Keys that are widened at a time, for all lines (a query token and one head) of an item.
_TILE = 32
# Kinds of caches.
FLOAT32, BFLOAT16, FLOAT16, INT8 = 0, 1, 2, 3
# Of an item: its row, first query token, number of them, and key head.
ITEM_FIELDS = 4
# Of a step: rows, tokens, key heads, their dim and that of values, block size, elements of a
# token's content, kind of the cache, width of the block table; addresses of query starts, lengths
# and block table; number of items and their address; address of the slots.
STEP_FIELDS = 15


@part_of_kernel
def _load(cache: Any, kind: int, at: int, content: int, out: Any) -> None:
    """Widen keys or values of one token and head to ``out``; ``at`` is their first element."""
    floats, halves, small = cache
    if kind == FLOAT32:
        for i in range(len(out)):
            out[i] = floats[at + i]
    elif kind == BFLOAT16:
        bits = out.view(np.uint32)
        for i in range(len(out)):
            bits[i] = np.uint32(halves[at + i]) << 16
    elif kind == FLOAT16:
        widen_half(halves[at : at + len(out)], out)
    else:
        scale = floats[(at + content) // 4 - 1]
        for i in range(len(out)):
            out[i] = np.float32(small[at + i]) * scale


@part_of_kernel
def _gather(cache: Any, geometry: Any, table: Any, place: Any, tiles: Any) -> bool:
    """Widen the keys and values of some tokens; False: a block is not in the cache."""
    kind, kv_heads, block_size, content, num_blocks = geometry
    head, first, count = place
    keys, values = tiles
    half = kv_heads * block_size * content
    for j in range(count):
        block = table[(first + j) // block_size]
        if block < 0 or block >= num_blocks:
            return False
        at = 2 * block * half + (head * block_size + (first + j) % block_size) * content
        _load(cache, kind, at, content, keys[j])
        _load(cache, kind, at + half, content, values[j])
    return True


@part_of_kernel
def _score(q: Any, keys: Any, scores: Any, layer: Any, distance: int) -> None:
    """Scores of a line with ``keys``; ``distance`` is that of the first."""
    scale, softcap, slope = layer
    for j in range(len(scores)):
        k = keys[j]
        dot = np.float32(0)
        for i in range(len(q)):
            dot += q[i] * k[i]
        score = dot * scale
        if softcap > 0:
            score = softcap * np.float32(math.tanh(score / softcap))
        scores[j] = score - slope * np.float32(distance - j)


@part_of_kernel
def _absorb(scores: Any, values: Any, sums: Any, state: Any) -> None:
    """Add values by the weights of their scores; ``state``: largest score, sum of weights."""
    new = state[0]
    for j in range(len(scores)):
        new = max(new, scores[j])
    shrink = exponential(state[0] - new)
    if shrink != np.float32(1):
        for i in range(len(sums)):
            sums[i] *= shrink
    total = state[1] * shrink
    for j in range(len(scores)):
        scores[j] = exponential(scores[j] - new)
    for j in range(len(scores)):
        weight = scores[j]
        v = values[j]
        total += weight
        for i in range(len(sums)):
            sums[i] += weight * v[i]
    state[0], state[1] = new, total


@part_of_kernel
def _attend(item: Any, step: Any, tensors: Any, cache: Any, layer: Any, scratch: Any) -> bool:
    """One item; False: a block is not in the cache."""
    query_start, seq_lens, table, geometry = step
    q, out, lse, sinks, slopes = tensors
    window, scale, softcap = layer
    keys, values, sums, states, scores = scratch
    row, token, count, head = item[0], item[1], item[2], item[3]
    group = q.shape[1] // geometry[1]
    position = seq_lens[row] - (query_start[row + 1] - token)
    start = max(0, position - window + 1) if window else 0
    sums[: count * group] = 0
    for line in range(count * group):
        states[line, 0] = sinks[head * group + line % group] if len(sinks) else -np.inf
        states[line, 1] = 1 if len(sinks) else 0
    for base in range(start, position + count, _TILE):
        size = min(_TILE, position + count - base)
        if not _gather(cache, geometry, table[row], (head, base, size), (keys, values)):
            return False
        for line in range(count * group):
            own = position + line // group
            low = max(0, own - window + 1 - base) if window else 0
            high = min(size, own + 1 - base)
            if low < high:
                h = head * group + line % group
                constants = (scale, softcap, slopes[h] if len(slopes) else np.float32(0))
                seen = scores[low:high]
                _score(
                    q[token + line // group, h], keys[low:high], seen, constants, own - base - low
                )
                _absorb(seen, values[low:high], sums[line], states[line])
    for line in range(count * group):
        t, h = token + line // group, head * group + line % group
        inverse = np.float32(1) / states[line, 1]
        for i in range(out.shape[2]):
            out[t, h, i] = sums[line, i] * inverse
        if len(lse):
            lse[t, h] = states[line, 0] + np.float32(math.log(states[line, 1]))
    return True


@part_of_kernel
def _attend_some(items: Any, step: Any, tensors: Any, cache: Any, layer: Any) -> bool:
    """The items, one after the other; False: a block is not in the cache."""
    q, out = tensors[0], tensors[1]
    lines = 0
    for i in range(len(items)):
        lines = max(lines, items[i, 2] * (q.shape[1] // step[3][1]))
    scratch = (
        np.empty((_TILE, q.shape[2]), np.float32),
        np.empty((_TILE, out.shape[2]), np.float32),
        np.empty((lines, out.shape[2]), np.float32),
        np.empty((lines, 2), np.float32),
        np.empty(_TILE, np.float32),
    )
    is_right = True
    for i in range(len(items)):
        is_right = is_right and _attend(items[i], step, tensors, cache, layer, scratch)
    return is_right


@part_of_kernel
def _present(address: int, size: int) -> int:
    return size if address else 0


@part_of_kernel
def _attend_part(place: Any, fields: Any, addresses: Any, sizes: Any, layer: Any) -> bool:
    """The part ``place`` (which one, of how many) of a step."""
    q, out, lse, sinks, slopes, cache = addresses
    num_heads, num_blocks = sizes
    rows, tokens, kv_heads, k_dim, v_dim = fields[0], fields[1], fields[2], fields[3], fields[4]
    block_size, content, kind, width = fields[5], fields[6], fields[7], fields[8]
    items = array_at(fields[13], (fields[12], ITEM_FIELDS), np.int64)
    geometry = (kind, kv_heads, block_size, content, num_blocks)
    elements = 2 * num_blocks * kv_heads * block_size * content
    step = (
        array_at(fields[9], rows + 1, np.int64),
        array_at(fields[10], rows, np.int64),
        array_at(fields[11], (rows, width), np.int32),
        geometry,
    )
    tensors = (
        array_at(q, (tokens, num_heads, k_dim), np.float32),
        array_at(out, (tokens, num_heads, v_dim), np.float32),
        array_at(lse, (_present(lse, tokens), num_heads), np.float32),
        array_at(sinks, _present(sinks, num_heads), np.float32),
        array_at(slopes, _present(slopes, num_heads), np.float32),
    )
    # As numbers of 32, 16 and 8 bits; the cache's kind says which ones it holds.
    views = (
        array_at(cache, elements // 4 if kind == INT8 else elements, np.float32),
        array_at(cache, elements, np.uint16),
        array_at(cache, elements, np.int8),
    )
    is_right: bool = _attend_some(items[place[0] :: place[1]], step, tensors, views, layer)
    return is_right


@parallel_kernel(f"int64({', '.join(['int64'] * 11)}, float64, float64)")
def attend(  # noqa: PLR0913 (addresses and sizes of a call)
    parts: int,
    step: int,
    q: int,
    num_heads: int,
    out: int,
    lse: int,
    sinks: int,
    slopes: int,
    cache: int,
    num_blocks: int,
    window: int,
    scale: float,
    softcap: float,
) -> int:
    """Attention of the tokens of the step whose fields are at ``step``.

    q and out are float32 [tokens, heads, dim]; lse, sinks and slopes may be 0. ``window``: 0 is
    none. Returns 0, or another number if a block is not in the cache.
    """
    faults = 0
    for part in prange(parts):
        is_right = _attend_part(
            (part, parts),
            array_at(step, STEP_FIELDS, np.int64),
            (q, out, lse, sinks, slopes, cache),
            (num_heads, num_blocks),
            (window, np.float32(scale), np.float32(softcap)),
        )
        faults += 0 if is_right else 1
    return faults


@part_of_kernel
def _store_token(given: Any, place: Any, size: int, content_bytes: int) -> None:
    """Copy ``size`` bytes of each head (``given``: address, stride, heads) to where the cache has
    the token (``place``: address of the first head's, tokens between heads)."""
    source, stride, heads = given
    target, apart = place
    for head in range(heads):
        old = array_at(source + head * stride, size, np.uint8)
        new = array_at(target + head * apart * content_bytes, size, np.uint8)
        for i in range(size):
            new[i] = old[i]


@kernel(f"int64({', '.join(['int64'] * 12)})")
def store(  # noqa: PLR0913 (addresses and sizes of a call)
    step: int,
    k: int,
    k_token_stride: int,
    k_head_stride: int,
    k_bytes: int,
    v: int,
    v_token_stride: int,
    v_head_stride: int,
    v_bytes: int,
    cache: int,
    num_blocks: int,
    content_bytes: int,
) -> int:
    """Copy each head of the step's keys and values, ``k_bytes`` and ``v_bytes`` long, to the
    tokens' slots; strides are in bytes. Returns 1 if a slot is not in the cache, of which the
    tokens before are stored."""
    fields = array_at(step, STEP_FIELDS, np.int64)
    tokens, kv_heads, block_size = fields[1], fields[2], fields[5]
    slots = array_at(fields[14], tokens, np.int64)
    for token in range(tokens):
        slot = slots[token]
        if slot >= num_blocks * block_size:
            return 1
        if slot < 0:
            continue
        half = kv_heads * block_size
        place = slot // block_size * 2 * half + slot % block_size
        keys = (k + token * k_token_stride, k_head_stride, kv_heads)
        values = (v + token * v_token_stride, v_head_stride, kv_heads)
        first = cache + place * content_bytes
        _store_token(keys, (first, block_size), k_bytes, content_bytes)
        first += half * content_bytes
        _store_token(values, (first, block_size), v_bytes, content_bytes)
    return 0
