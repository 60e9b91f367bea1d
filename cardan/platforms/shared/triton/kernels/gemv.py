"""A matrix times one vector: bound by reading the matrix, which this does at nearly full rate."""

import triton
import triton.language as tl


@triton.jit
def gemv_kernel(
    x,
    weight,
    bias,
    out,
    num_outputs,
    row_stride,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """out [num_outputs] = weight [num_outputs, INPUTS] @ x + bias, summed in float32.

    A program takes OUTPUTS rows whole, BLOCK elements at a time: many small programs keep more
    loads under way than few that work ahead.
    """
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    place = tl.arange(0, BLOCK)
    is_output = output < num_outputs
    rows = weight + output.to(tl.int64)[:, None] * row_stride + place[None, :]
    total = tl.zeros([OUTPUTS, BLOCK], tl.float32)
    for start in tl.range(0, INPUTS, BLOCK, num_stages=1):
        inside = start + place < INPUTS
        mask = is_output[:, None] & inside[None, :]
        part = tl.load(rows + start, mask=mask, other=0.0, eviction_policy="evict_first")
        values = tl.load(x + start + place, mask=inside, other=0.0)
        total += part.to(tl.float32) * values.to(tl.float32)[None, :]
    result = tl.sum(total, 1)
    if HAS_BIAS:
        result += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)
    tl.store(out + output, result.to(out.dtype.element_ty), mask=is_output)
