"""Root-mean-square normalisation: one program a row."""

import triton
import triton.language as tl


@triton.jit
def _normed(values, weight, columns, inside, eps, HIDDEN: tl.constexpr):
    """float32 ``values`` of one row, 0 outside, over their root mean square, times ``weight``."""
    inverse_rms = tl.rsqrt(tl.sum(values * values, 0) / HIDDEN + eps)
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    return values * inverse_rms * scale


@triton.jit
def rms_norm_kernel(
    x,
    weight,
    out,
    eps,
    inner,
    outer_stride,
    inner_stride,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out [rows, HIDDEN] = x / rms(x) * weight; row r of x is at (r // inner, r % inner)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    source = x + (row // inner) * outer_stride + (row % inner) * inner_stride
    values = tl.load(source + columns, mask=inside, other=0.0).to(tl.float32)
    normed = _normed(values, weight, columns, inside, eps, HIDDEN)
    tl.store(out + row * HIDDEN + columns, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def add_rms_norm_kernel(
    x,
    residual,
    weight,
    normed_out,
    residual_out,
    eps,
    x_stride,
    residual_stride,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """residual_out = x + residual, rounded to its dtype; normed_out = rms_norm of that."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    left = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(residual + row * residual_stride + columns, mask=inside, other=0.0)
    total = (left + right.to(tl.float32)).to(residual_out.dtype.element_ty)
    tl.store(residual_out + row * HIDDEN + columns, total, mask=inside)
    normed = _normed(total.to(tl.float32), weight, columns, inside, eps, HIDDEN)
    tl.store(
        normed_out + row * HIDDEN + columns, normed.to(normed_out.dtype.element_ty), mask=inside
    )
