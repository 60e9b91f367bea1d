"""Products with few rows of activations, as ``linear`` is defined; the library has the others."""

import torch
from torch import Tensor
from torch.nn import functional

from cardan.platforms.shared.triton.dependent_launch import are_fixed, can_overlap, dependent
from cardan.platforms.shared.triton.kernels.gemv import gemv_kernel
from cardan.platforms.shared.triton.kernels.skinny import add_shares_kernel, skinny_kernel
from cardan.platforms.shared.triton.linear_tuning import (
    RowTuning,
    SkinnyTuning,
    row_tuning,
    skinny_tuning,
)
from cardan.platforms.shared.triton.rows import as_rows, power_of_two

# Elements of the results that one program adds up.
_ADD_BLOCK = 512
# Rows of a tile, at least: what products of tiles take.
_LEAST_ROWS = 16


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = few_rows(x, weight, bias, x.dtype)
    return functional.linear(x, weight, bias) if out is None else out


def linear_float32(x: Tensor, weight: Tensor) -> Tensor:
    out = few_rows(x, weight, None, torch.float32)
    return functional.linear(x, weight).to(torch.float32) if out is None else out


def few_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None, result_dtype: torch.dtype
) -> Tensor | None:
    """``linear`` with results of ``result_dtype``, where a kernel is made for so few rows."""
    outputs, inputs = weight.shape
    # What does not fit together is the library's to refuse.
    if x.shape[-1] != inputs or not x.numel() or weight.stride(1) != 1:
        return None
    num_rows = x.numel() // inputs
    if num_rows == 1:
        return multiply_row(x, weight, bias, row_tuning(inputs), result_dtype)
    # The kernel for few rows was measured where launches overlap.
    tuning = skinny_tuning(num_rows, outputs, inputs) if can_overlap(x.device) else None
    if tuning is None:
        return None
    return multiply_rows(x, weight, bias, tuning, result_dtype)


def multiply_row(
    x: Tensor, weight: Tensor, bias: Tensor | None, tuning: RowTuning, result_dtype: torch.dtype
) -> Tensor:
    """``linear`` of a single row."""
    outputs, inputs = weight.shape
    out = torch.empty((*x.shape[:-1], outputs), dtype=result_dtype, device=x.device)
    gemv_kernel[(-(-outputs // tuning.outputs),)](
        x if x.stride(-1) == 1 else x.contiguous(),
        weight,
        out if bias is None else bias,
        out,
        outputs,
        weight.stride(0),
        are_fixed(x),
        INPUTS=inputs,
        OUTPUTS=tuning.outputs,
        BLOCK=tuning.block,
        HAS_BIAS=bias is not None,
        num_warps=tuning.num_warps,
        **dependent(x, 1),
    )
    return out


def multiply_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None, tuning: SkinnyTuning, result_dtype: torch.dtype
) -> Tensor:
    """``linear`` of a few rows, at least one; shares of the inputs are added up in their order."""
    outputs, inputs = weight.shape
    rows = as_rows(x)
    num_rows, share = len(rows), tuning.share(inputs)
    shares = -(-inputs // share)
    out = torch.empty((*x.shape[:-1], outputs), dtype=result_dtype, device=x.device)
    sums = out
    if shares > 1:
        sums = torch.empty(shares, num_rows, outputs, dtype=torch.float32, device=x.device)
    options = dependent(x, num_rows)
    skinny_kernel[(-(-outputs // tuning.outputs), shares)](
        rows,
        weight,
        out if bias is None else bias,
        sums,
        num_rows,
        outputs,
        rows.stride(0),
        weight.stride(0),
        inputs,
        share,
        ROWS=max(_LEAST_ROWS, power_of_two(num_rows)),
        OUTPUTS=tuning.outputs,
        BLOCK=tuning.block,
        STAGES=tuning.num_stages,
        IS_WHOLE=inputs % share == 0 and share % tuning.block == 0,
        HAS_BIAS=bias is not None and shares == 1,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        **options,
    )
    if shares > 1:
        add_shares_kernel[(-(-out.numel() // _ADD_BLOCK),)](
            sums,
            out if bias is None else bias,
            out,
            out.numel(),
            outputs,
            SHARES=shares,
            BLOCK=_ADD_BLOCK,
            HAS_BIAS=bias is not None,
            num_warps=4,
            **options,
        )
    return out
