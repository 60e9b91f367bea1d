"""A matrix times a few vectors: the matrix is the wide operand of the tiles' products."""

import triton
import triton.language as tl

from cardan.platforms.shared.triton.kernels.dependent_launch import (
    let_next_begin,
    wait_for_earlier,
)
from cardan.platforms.shared.triton.launched import launched


@launched
@triton.jit(do_not_specialize=["num_rows"])
def skinny_kernel(
    x,
    weight,
    bias,
    out,
    num_rows,
    num_outputs,
    x_stride,
    row_stride,
    inputs,
    share,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """out [num_rows, num_outputs] = x @ weight^T + bias, with num_rows <= ROWS, summed in float32.

    Program (OUTPUTS outputs, ``share`` of the inputs). With several shares each leaves its sums in
    ``out`` [shares, num_rows, num_outputs], float32, and HAS_BIAS is not set. IS_WHOLE: all shares
    are whole blocks.
    """
    let_next_begin(OVERLAPS)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    first = tl.program_id(1) * share
    row = tl.arange(0, ROWS)
    place = tl.arange(0, BLOCK)
    is_output = output < num_outputs
    is_row = row < num_rows
    # What is past the last output is computed of the last one, and not stored: no mask is needed.
    held = tl.minimum(output, num_outputs - 1).to(tl.int64)
    weights = weight + held[:, None] * row_stride + (first + place)[None, :]
    columns = x + row.to(tl.int64)[None, :] * x_stride + (first + place)[:, None]
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    wait_for_earlier(OVERLAPS)
    for start in tl.range(0, share, BLOCK, num_stages=STAGES):
        if IS_WHOLE:
            part = tl.load(weights + start)
            values = tl.load(columns + start, mask=is_row[None, :], other=0.0)
        else:
            inside = (start + place < share) & (first + start + place < inputs)
            part = tl.load(weights + start, mask=inside[None, :], other=0.0)
            mask = inside[:, None] & is_row[None, :]
            values = tl.load(columns + start, mask=mask, other=0.0)
        total = tl.dot(part, values, total)
    if HAS_BIAS:
        total += tl.load(bias + held).to(tl.float32)[:, None]
    line = tl.program_id(1) * num_rows + row
    into = out + line.to(tl.int64)[None, :] * num_outputs + output[:, None]
    mask = is_output[:, None] & is_row[None, :]
    tl.store(into, total.to(out.dtype.element_ty), mask=mask)


@launched
@triton.jit
def add_shares_kernel(
    shares,
    bias,
    out,
    size,
    num_outputs,
    SHARES: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """out [size] = the sum of shares [SHARES, size], in their order, plus bias [num_outputs] over
    and over."""
    let_next_begin(OVERLAPS)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    wait_for_earlier(OVERLAPS)
    total = tl.load(shares + place, mask=inside, other=0.0)
    for share in tl.static_range(1, SHARES):
        total += tl.load(shares + share * size + place, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + place % num_outputs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)
