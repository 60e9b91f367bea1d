"""Root-mean-square normalisation: one program a row."""

import triton
import triton.language as tl

from cardan.platforms.shared.triton.kernels.dependent_launch import (
    let_next_begin,
    wait_for_constants,
    wait_for_earlier,
)
from cardan.platforms.shared.triton.launched import launched


@triton.jit
def _normed(values, scale, eps, HIDDEN: tl.constexpr):
    """float32 ``values`` of one row, 0 outside, over their root mean square, times ``scale``."""
    inverse_rms = tl.rsqrt(tl.sum(values * values, 0) / HIDDEN + eps)
    return values * inverse_rms * scale.to(tl.float32)


@launched
@triton.jit(do_not_specialize=["is_fixed"])
def rms_norm_kernel(
    x,
    weight,
    out,
    eps,
    inner,
    outer_stride,
    inner_stride,
    is_fixed,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """out [rows, HIDDEN] = x / rms(x) * weight; row r of x is at (r // inner, r % inner)."""
    let_next_begin(OVERLAPS)
    wait_for_constants(is_fixed, OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    scale = tl.load(weight + columns, mask=inside, other=0.0)
    wait_for_earlier(OVERLAPS)
    source = x + (row // inner) * outer_stride + (row % inner) * inner_stride
    values = tl.load(source + columns, mask=inside, other=0.0).to(tl.float32)
    normed = _normed(values, scale, eps, HIDDEN)
    tl.store(out + row * HIDDEN + columns, normed.to(out.dtype.element_ty), mask=inside)


@launched
@triton.jit(do_not_specialize=["is_fixed"])
def add_rms_norm_kernel(
    x,
    residual,
    weight,
    normed_out,
    residual_out,
    eps,
    x_stride,
    residual_stride,
    is_fixed,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """residual_out = x + residual, rounded to its dtype; normed_out = rms_norm of that."""
    let_next_begin(OVERLAPS)
    wait_for_constants(is_fixed, OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    scale = tl.load(weight + columns, mask=inside, other=0.0)
    wait_for_earlier(OVERLAPS)
    left = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(residual + row * residual_stride + columns, mask=inside, other=0.0)
    total = (left + right.to(tl.float32)).to(residual_out.dtype.element_ty)
    tl.store(residual_out + row * HIDDEN + columns, total, mask=inside)
    normed = _normed(total.to(tl.float32), scale, eps, HIDDEN)
    tl.store(
        normed_out + row * HIDDEN + columns, normed.to(normed_out.dtype.element_ty), mask=inside
    )
