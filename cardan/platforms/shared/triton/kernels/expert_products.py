"""Products of rows with the weights of the experts that they go to."""

import triton
import triton.language as tl


@triton.jit
def silu_times(gate, up):
    return gate / (1.0 + tl.exp(-gate)) * up


# Steps of any number of tokens run the same code.
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
):
    """out [num_pairs, OUTPUTS]; pair p has row p // SHARERS of x [rows, INPUTS].

    GATED: silu(gate) * up of an expert's gate and up projections, [OUTPUTS, INPUTS] each, one
    after the other. Else the product with a projection [OUTPUTS, INPUTS], times weights [p]. A
    program takes TILE pairs of one expert, as ``place_kernel`` left them, and WIDTH outputs; GROUP
    tiles go through the weights side by side. The weights, of which there are more, are the
    product's left side.
    """
    num_parts: tl.constexpr = (OUTPUTS + WIDTH - 1) // WIDTH
    program = tl.program_id(0)
    first = program // (GROUP * num_parts) * GROUP
    beside = min(most_tiles - first, GROUP)
    within = program % (GROUP * num_parts)
    tile = first + within % beside
    if tile >= tl.load(tile_experts + most_tiles):
        return
    expert = tl.load(tile_experts + tile).to(tl.int64)
    pair = tl.load(pairs + tile * TILE + tl.arange(0, TILE))
    is_pair = pair < num_pairs
    output = within // beside * WIDTH + tl.arange(0, WIDTH)
    is_output = output < OUTPUTS
    place = tl.arange(0, BLOCK)
    # What lies outside is computed from other rows, and not stored.
    row = tl.where(is_pair, pair, 0) // SHARERS
    values_at = x + row.to(tl.int64)[None, :] * x_stride + place[:, None]
    own = tl.where(is_output, output, 0)
    weights_at = experts + expert * expert_stride + own[:, None] * INPUTS + place[None, :]
    total = tl.zeros([WIDTH, TILE], tl.float32)
    other = tl.zeros([WIDTH, TILE], tl.float32)
    for start in range(0, INPUTS, BLOCK):
        if INPUTS % BLOCK == 0:
            values = tl.load(values_at + start)
            part = tl.load(weights_at + start)
        else:
            inside = start + place < INPUTS
            values = tl.load(values_at + start, mask=inside[:, None], other=0.0)
            part = tl.load(weights_at + start, mask=inside[None, :], other=0.0)
        total = tl.dot(part, values, total, input_precision="ieee")
        if GATED:
            up_at = weights_at + start + OUTPUTS * INPUTS
            if INPUTS % BLOCK == 0:
                up = tl.load(up_at)
            else:
                up = tl.load(up_at, mask=(start + place < INPUTS)[None, :], other=0.0)
            other = tl.dot(up, values, other, input_precision="ieee")
    if GATED:
        result = silu_times(total, other)
    else:
        result = total * tl.load(weights + pair, mask=is_pair, other=0.0)[None, :]
    into = out + pair.to(tl.int64)[None, :] * OUTPUTS + output[:, None]
    mask = is_pair[None, :] & is_output[:, None]
    tl.store(into, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def add_up_kernel(parts, out, TOP_K: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    """out [rows, HIDDEN]: sums over the middle of parts [rows, TOP_K, HIDDEN], in order."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < HIDDEN
    total = tl.zeros([BLOCK], tl.float32)
    for place in range(TOP_K):
        source = parts + (row * TOP_K + place) * HIDDEN + column
        total += tl.load(source, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * HIDDEN + column, total.to(out.dtype.element_ty), mask=inside)


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
):
    """out [pairs, INNER] = silu(gate) * up for few rows of x: a program takes WIDTH outputs of a
    pair. Bound by reading weights, which small programs that do not work ahead do fastest."""
    pair = tl.program_id(1)
    expert = tl.load(ids + pair).to(tl.int64)
    output = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
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


@triton.jit
def down_row_kernel(
    x,
    experts,
    ids,
    weights,
    out,
    expert_stride,
    TOP_K: tl.constexpr,
    INNER: tl.constexpr,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out [rows, HIDDEN]: the weighted sum of a row's down projections, of x [rows, TOP_K, INNER],
    for few rows: a program takes WIDTH outputs of a row."""
    row = tl.program_id(1)
    output = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    is_output = output < HIDDEN
    place = tl.arange(0, BLOCK)
    result = tl.zeros([WIDTH], tl.float32)
    for turn in range(TOP_K):
        pair = row * TOP_K + turn
        expert = tl.load(ids + pair).to(tl.int64)
        source = x + pair.to(tl.int64) * INNER + place
        rows = experts + expert * expert_stride + output[:, None] * INNER + place[None, :]
        total = tl.zeros([WIDTH, BLOCK], tl.float32)
        for start in tl.range(0, INNER, BLOCK, num_stages=1):
            inside = start + place < INNER
            mask = is_output[:, None] & inside[None, :]
            part = tl.load(rows + start, mask=mask, other=0.0).to(tl.float32)
            values = tl.load(source + start, mask=inside, other=0.0).to(tl.float32)
            total += part * values[None, :]
        result += tl.sum(total, 1) * tl.load(weights + pair)
    into = out + row.to(tl.int64) * HIDDEN + output
    tl.store(into, result.to(out.dtype.element_ty), mask=is_output)
