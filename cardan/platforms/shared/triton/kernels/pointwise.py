"""Gated activations, the soft cap, and the search for what is not finite."""

import triton
import triton.language as tl


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


@triton.jit
def silu_and_mul_kernel(x, out, row_stride, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    """out [rows, HIDDEN] = silu(x[:, :HIDDEN]) * x[:, HIDDEN:]."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    source = x + row * row_stride + columns
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + HIDDEN, mask=inside, other=0.0).to(tl.float32)
    values = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * HIDDEN + columns, values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gelu_tanh_and_mul_kernel(x, out, row_stride, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    """out [rows, HIDDEN] = gelu(x[:, :HIDDEN]) * x[:, HIDDEN:]; (1 + tanh(u)) / 2 is the logistic
    function of 2u."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    source = x + row * row_stride + columns
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + HIDDEN, mask=inside, other=0.0).to(tl.float32)
    twice = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    values = gate / (1.0 + tl.exp(-twice)) * up
    tl.store(out + row * HIDDEN + columns, values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def soft_cap_kernel(x, out, cap, row_stride, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    """out [rows, HIDDEN] = cap * tanh(x / cap)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    values = tl.load(x + row * row_stride + columns, mask=inside, other=0.0).to(tl.float32)
    capped = cap * tanh(values / cap)
    tl.store(out + row * HIDDEN + columns, capped.to(out.dtype.element_ty), mask=inside)


@triton.jit
def finite_rows_kernel(x, out, row_stride, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    """out [rows] bool: whether all of a row is finite."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    values = tl.load(x + row * row_stride + columns, mask=inside, other=0.0).to(tl.float32)
    # Zero times an infinity or NaN is NaN, which differs from zero.
    faults = tl.sum((values * 0.0 != 0.0).to(tl.int32), 0)
    tl.store(out + row, faults == 0)
