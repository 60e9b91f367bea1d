"""Gated activations, the soft cap, and the search for what is not finite."""

import triton
import triton.language as tl

from cardan.platforms.shared.triton.kernels.dependent_launch import (
    let_next_begin,
    wait_for_earlier,
)
from cardan.platforms.shared.triton.launched import launched


@triton.jit
def tanh(x):
    """Series near 0, where 1 - exp(-2|x|) would cancel."""
    size = tl.abs(x)
    square = x * x
    series = 1.0 + square * (
        -1.0 / 3.0 + square * (2.0 / 15.0 + square * (-17.0 / 315.0 + square * (62.0 / 2835.0)))
    )
    fall = tl.exp(-2.0 * size)
    far = (1.0 - fall) / (1.0 + fall)
    return tl.where(size < 0.25, x * series, tl.where(x < 0, -far, far))


@launched
@triton.jit
def silu_and_mul_kernel(x, out, row_stride, hidden, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    """out [rows, hidden] = silu(x[:, :hidden]) * x[:, hidden:]."""
    let_next_begin(OVERLAPS)
    wait_for_earlier(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < hidden
    source = x + row * row_stride + columns
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + hidden, mask=inside, other=0.0).to(tl.float32)
    values = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * hidden + columns, values.to(out.dtype.element_ty), mask=inside)


@launched
@triton.jit
def gelu_tanh_and_mul_kernel(
    x, out, row_stride, hidden, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr
):
    """out [rows, hidden] = gelu(x[:, :hidden]) * x[:, hidden:]; (1 + tanh(u)) / 2 is the logistic
    function of 2u."""
    let_next_begin(OVERLAPS)
    wait_for_earlier(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < hidden
    source = x + row * row_stride + columns
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + hidden, mask=inside, other=0.0).to(tl.float32)
    twice = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    values = gate / (1.0 + tl.exp(-twice)) * up
    tl.store(out + row * hidden + columns, values.to(out.dtype.element_ty), mask=inside)


@launched
@triton.jit
def soft_cap_kernel(x, out, cap, row_stride, hidden, BLOCK: tl.constexpr):
    """out [rows, hidden] = cap * tanh(x / cap)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < hidden
    values = tl.load(x + row * row_stride + columns, mask=inside, other=0.0).to(tl.float32)
    capped = cap * tanh(values / cap)
    tl.store(out + row * hidden + columns, capped.to(out.dtype.element_ty), mask=inside)


@launched
@triton.jit
def finite_rows_kernel(x, out, row_stride, hidden, BLOCK: tl.constexpr):
    """out [rows] bool: whether all of a row [hidden] is finite."""
    row = tl.program_id(0).to(tl.int64)
    faults = tl.zeros([BLOCK], tl.int32)
    for start in range(0, hidden, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        values = tl.load(x + row * row_stride + columns, mask=columns < hidden, other=0.0)
        # Zero times an infinity or NaN is NaN, which differs from zero.
        faults |= (values.to(tl.float32) * 0.0 != 0.0).to(tl.int32)
    tl.store(out + row, tl.max(faults, 0) == 0)
