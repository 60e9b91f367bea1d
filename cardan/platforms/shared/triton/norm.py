"""Launches of the normalisations; arguments and results as ``rms_norm`` and ``fused_add_rms_norm``
are defined."""

import torch
from torch import Tensor

from cardan.platforms.shared.triton.dependent_launch import are_fixed, dependent
from cardan.platforms.shared.triton.kernels.norm import add_rms_norm_kernel, rms_norm_kernel
from cardan.platforms.shared.triton.rows import as_rows, num_warps, power_of_two


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    hidden = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = x if x.dim() == 3 and x.stride(-1) == 1 else as_rows(x).unsqueeze(1)
    num_rows, block = rows.shape[0] * rows.shape[1], power_of_two(hidden)
    if num_rows:
        rms_norm_kernel[(num_rows,)](
            rows,
            weight,
            out,
            eps,
            rows.shape[1],
            rows.stride(0),
            rows.stride(1),
            are_fixed(x),
            HIDDEN=hidden,
            BLOCK=block,
            num_warps=num_warps(block),
            **dependent(x, num_rows),
        )
    return out


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    hidden = x.shape[-1]
    normed, total = torch.empty((2, *x.shape), dtype=x.dtype, device=x.device).unbind(0)
    rows, others = as_rows(x), as_rows(residual)
    block = power_of_two(hidden)
    if len(rows):
        add_rms_norm_kernel[(len(rows),)](
            rows,
            others,
            weight,
            normed,
            total,
            eps,
            rows.stride(0),
            others.stride(0),
            are_fixed(x),
            HIDDEN=hidden,
            BLOCK=block,
            num_warps=num_warps(block),
            **dependent(x, len(rows)),
        )
    return normed, total
