"""A matrix times one vector: bound by reading the matrix, which this does at nearly full rate."""

import triton
import triton.language as tl

from cardan.platforms.shared.triton.kernels.dependent_launch import (
    let_next_begin,
    wait_for_constants,
    wait_for_earlier,
)
from cardan.platforms.shared.triton.launched import launched


@launched
@triton.jit(do_not_specialize=["is_fixed"])
def gemv_kernel(
    x,
    weight,
    bias,
    out,
    num_outputs,
    row_stride,
    is_fixed,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """out [num_outputs] = weight [num_outputs, INPUTS] @ x + bias, summed in float32.

    A program takes OUTPUTS rows whole, BLOCK elements at a time: many small programs keep more
    loads under way than few that work ahead. Its first elements of the weight do not wait for x.
    """
    let_next_begin(OVERLAPS)
    wait_for_constants(is_fixed, OVERLAPS)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    place = tl.arange(0, BLOCK)
    is_output = output < num_outputs
    rows = weight + output.to(tl.int64)[:, None] * row_stride + place[None, :]
    inside = place < INPUTS
    mask = is_output[:, None] & inside[None, :]
    part = tl.load(rows, mask=mask, other=0.0, eviction_policy="evict_first")
    wait_for_earlier(OVERLAPS)
    values = tl.load(x + place, mask=inside, other=0.0)
    total = part.to(tl.float32) * values.to(tl.float32)[None, :]
    for start in tl.range(BLOCK, INPUTS, BLOCK, num_stages=1):
        inside = start + place < INPUTS
        mask = is_output[:, None] & inside[None, :]
        part = tl.load(rows + start, mask=mask, other=0.0, eviction_policy="evict_first")
        values = tl.load(x + start + place, mask=inside, other=0.0)
        total += part.to(tl.float32) * values.to(tl.float32)[None, :]
    result = tl.sum(total, 1)
    if HAS_BIAS:
        result += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)
    tl.store(out + output, result.to(out.dtype.element_ty), mask=is_output)
