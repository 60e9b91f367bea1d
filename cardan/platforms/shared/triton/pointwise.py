"""Launches of the gated activations, the soft cap and ``finite_rows``; arguments and results as
these operations are defined.

What the kernels are compiled for does not depend on a row's length, beyond whether it is a multiple
of 16: what the first check of an operation compiles serves every model.
"""

from typing import Any

import torch
from torch import Tensor

from cardan.platforms.shared.triton.dependent_launch import dependent
from cardan.platforms.shared.triton.kernels.pointwise import (
    finite_rows_kernel,
    gelu_tanh_and_mul_kernel,
    silu_and_mul_kernel,
    soft_cap_kernel,
)
from cardan.platforms.shared.triton.rows import as_rows

# Elements that one program computes at once.
_BLOCK = 1024


def silu_and_mul(x: Tensor) -> Tensor:
    return _gated(silu_and_mul_kernel, x)


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    return _gated(gelu_tanh_and_mul_kernel, x)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, hidden = as_rows(x), x.shape[-1]
    if len(rows):
        soft_cap_kernel[(len(rows), -(-hidden // _BLOCK))](
            rows, out, cap, rows.stride(0), hidden, BLOCK=_BLOCK
        )
    return out


def finite_rows(x: Tensor) -> Tensor:
    rows, hidden = as_rows(x), x.shape[-1]
    out = torch.empty(len(rows), dtype=torch.bool, device=x.device)
    if len(rows):
        finite_rows_kernel[(len(rows),)](rows, out, rows.stride(0), hidden, BLOCK=_BLOCK)
    return out


def _gated(kernel: Any, x: Tensor) -> Tensor:
    hidden = x.shape[-1] // 2
    out = torch.empty((*x.shape[:-1], hidden), dtype=x.dtype, device=x.device)
    rows = as_rows(x)
    if len(rows):
        kernel[(len(rows), -(-hidden // _BLOCK))](
            rows, out, rows.stride(0), hidden, BLOCK=_BLOCK, **dependent(x, len(rows))
        )
    return out
