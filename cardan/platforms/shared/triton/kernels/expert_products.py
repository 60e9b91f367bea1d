"""Products of rows with the weights of the experts that they go to.

Each layer has a first product, of gate and up, and right behind it the second one, of down. Where
launches overlap (``dependent_launch``), the first lets the second begin only after its own wait, so
that the second may load the routing, and weights, before it waits for the first one's results.
"""

import triton
import triton.language as tl

from cardan.platforms.shared.triton.kernels.dependent_launch import (
    let_next_begin,
    wait_for_earlier,
)
from cardan.platforms.shared.triton.launched import launched


@triton.jit
def silu_times(gate, up):
    return gate / (1.0 + tl.exp(-gate)) * up


# Steps of any number of tokens run the same code.
@launched
@triton.jit(do_not_specialize=["num_pairs", "most_tiles"])
def grouped_kernel(
    x,
    experts,
    pairs,
    tile_experts,
    weights,
    out,
    num_pairs,
    most_tiles,
    x_stride,
    expert_stride,
    SHARERS: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    GATED: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    WEIGHTS_LEFT: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """out [num_pairs, OUTPUTS]; pair p has row p // SHARERS of x [rows, INPUTS].

    GATED: silu(gate) * up of an expert's gate and up projections, [OUTPUTS, INPUTS] each, one
    after the other, of which WIDTH lines each make one operand. Else the product with a projection
    [OUTPUTS, INPUTS], times weights [p]. A program takes TILE pairs of one expert, as
    ``place_kernel`` left them, and WIDTH outputs; GROUP tiles go through the weights side by side.
    WEIGHTS_LEFT: weights are the product's left side, which is the longer one of an instruction.
    """
    if GATED:
        wait_for_earlier(OVERLAPS)
    let_next_begin(OVERLAPS)
    sides: tl.constexpr = 2 if GATED else 1
    num_parts: tl.constexpr = (OUTPUTS + WIDTH - 1) // WIDTH
    program = tl.program_id(0)
    first = program // (GROUP * num_parts) * GROUP
    beside = min(most_tiles - first, GROUP)
    within = program % (GROUP * num_parts)
    tile = first + within % beside
    # All three are on their way before the first is looked at.
    num_tiles = tl.load(tile_experts + most_tiles)
    expert = tl.load(tile_experts + tile).to(tl.int64)
    pair = tl.load(pairs + tile * TILE + tl.arange(0, TILE))
    wait_for_earlier(OVERLAPS)
    if tile >= num_tiles:
        return
    is_pair = pair < num_pairs
    place = tl.arange(0, BLOCK)
    # What lies outside is computed from other rows, and not stored.
    row = tl.where(is_pair, pair, 0) // SHARERS
    values_at = x + row.to(tl.int64)[:, None] * x_stride + place[None, :]
    first_output = within // beside * WIDTH
    line = tl.arange(0, sides * WIDTH)
    own = first_output + line % WIDTH
    own = tl.where(own < OUTPUTS, own, 0) + line // WIDTH * OUTPUTS
    weights_at = experts + expert * expert_stride + own[:, None] * INPUTS + place[None, :]
    if WEIGHTS_LEFT:
        total = tl.zeros([sides * WIDTH, TILE], tl.float32)
    else:
        total = tl.zeros([TILE, sides * WIDTH], tl.float32)
    for start in range(0, INPUTS, BLOCK):
        if INPUTS % BLOCK == 0:
            values = tl.load(values_at + start)
            part = tl.load(weights_at + start)
        else:
            inside = (start + place < INPUTS)[None, :]
            values = tl.load(values_at + start, mask=inside, other=0.0)
            part = tl.load(weights_at + start, mask=inside, other=0.0)
        if WEIGHTS_LEFT:
            total = tl.dot(part, tl.trans(values), total, input_precision="ieee")
        else:
            total = tl.dot(values, tl.trans(part), total, input_precision="ieee")
    if WEIGHTS_LEFT:
        total = tl.trans(total)
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(total, [TILE, 2, WIDTH]), [0, 2, 1]))
        result = silu_times(gate, up)
    else:
        result = total * tl.load(weights + pair, mask=is_pair, other=0.0)[:, None]
    output = first_output + tl.arange(0, WIDTH)
    into = out + pair.to(tl.int64)[:, None] * OUTPUTS + output[None, :]
    mask = is_pair[:, None] & (output < OUTPUTS)[None, :]
    tl.store(into, result.to(out.dtype.element_ty), mask=mask)


@launched
@triton.jit
def add_up_kernel(
    parts,
    out,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """out [rows, HIDDEN]: sums over the middle of parts [rows, TOP_K, HIDDEN], in order."""
    let_next_begin(OVERLAPS)
    wait_for_earlier(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < HIDDEN
    source = parts + row * TOP_K * HIDDEN + column
    total = tl.zeros([BLOCK], tl.float32)
    for place in tl.static_range(TOP_K):
        total += tl.load(source + place * HIDDEN, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * HIDDEN + column, total.to(out.dtype.element_ty), mask=inside)


@launched
@triton.jit
def gate_up_row_kernel(
    x,
    experts,
    ids,
    out,
    x_stride,
    expert_stride,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """out [pairs, INNER] = silu(gate) * up for few rows of x: a program takes WIDTH outputs of a
    pair. Bound by reading weights, which small programs that do not work ahead do fastest; those
    that read the same lines for several pairs run at the same time."""
    wait_for_earlier(OVERLAPS)
    let_next_begin(OVERLAPS)
    pair = tl.program_id(0)
    expert = tl.load(ids + pair).to(tl.int64)
    output = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    is_output = output < INNER
    place = tl.arange(0, BLOCK)
    source = x + (pair // TOP_K).to(tl.int64) * x_stride + place
    rows = experts + expert * expert_stride + output[:, None] * HIDDEN + place[None, :]
    gate = tl.zeros([WIDTH, BLOCK], tl.float32)
    up = tl.zeros([WIDTH, BLOCK], tl.float32)
    for start in tl.range(0, HIDDEN, BLOCK, num_stages=1):
        inside = start + place < HIDDEN
        mask = is_output[:, None] & inside[None, :]
        gate_part = tl.load(rows + start, mask=mask, other=0.0)
        up_part = tl.load(rows + start + INNER * HIDDEN, mask=mask, other=0.0)
        values = tl.load(source + start, mask=inside, other=0.0).to(tl.float32)[None, :]
        gate += gate_part.to(tl.float32) * values
        up += up_part.to(tl.float32) * values
    result = silu_times(tl.sum(gate, 1), tl.sum(up, 1))
    into = out + pair.to(tl.int64) * INNER + output
    tl.store(into, result.to(out.dtype.element_ty), mask=is_output)


@launched
@triton.jit
def down_row_kernel(
    x,
    experts,
    ids,
    weights,
    out,
    expert_stride,
    TOP_K: tl.constexpr,
    PLACES: tl.constexpr,
    INNER: tl.constexpr,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """out [rows, HIDDEN]: the weighted sum of a row's down projections, of x [rows, TOP_K, INNER],
    for few rows: a program takes WIDTH outputs of a row, of all its experts (PLACES, a power of
    two, holds TOP_K) at once, so that there is much to read at any time. The first BLOCK of its
    weights does not wait for x."""
    let_next_begin(OVERLAPS)
    row = tl.program_id(0)
    line = tl.arange(0, PLACES * WIDTH)
    output = tl.program_id(1) * WIDTH + line % WIDTH
    turn = line // WIDTH
    is_turn = turn < TOP_K
    pair = row * TOP_K + turn
    expert = tl.load(ids + pair, mask=is_turn, other=0).to(tl.int64)
    share = tl.load(weights + pair, mask=is_turn, other=0.0)
    is_line = is_turn & (output < HIDDEN)
    place = tl.arange(0, BLOCK)
    source = x + pair.to(tl.int64)[:, None] * INNER + place[None, :]
    lines = experts + expert[:, None] * expert_stride + output[:, None] * INNER + place[None, :]
    mask = is_line[:, None] & (place < INNER)[None, :]
    part = tl.load(lines, mask=mask, other=0.0)
    wait_for_earlier(OVERLAPS)
    total = part.to(tl.float32) * tl.load(source, mask=mask, other=0.0).to(tl.float32)
    for start in tl.range(BLOCK, INNER, BLOCK, num_stages=1):
        mask = is_line[:, None] & (start + place < INNER)[None, :]
        part = tl.load(lines + start, mask=mask, other=0.0)
        total += part.to(tl.float32) * tl.load(source + start, mask=mask, other=0.0).to(tl.float32)
    result = tl.sum(tl.reshape(tl.sum(total, 1) * share, [PLACES, WIDTH]), 0)
    own = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    into = out + row.to(tl.int64) * HIDDEN + own
    tl.store(into, result.to(out.dtype.element_ty), mask=own < HIDDEN)
