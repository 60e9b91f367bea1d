"""Norms by the kernels of AITER; arguments and results as the operations are defined.

Never run on hardware by those who wrote this; where a kernel does not agree with the operation's
definition on first use, the next provider serves it.
"""

import torch
from torch import Tensor

from cardan.platforms.rocm.aiter_import import aiter_function
from cardan.platforms.shared.triton import norm as triton_norm

_RMS_NORM = aiter_function("rms_norm")
_ADD_RMS_NORM = aiter_function("rmsnorm2d_fwd_with_add")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    # The kernels want a weight of x's dtype; a wide one would lose digits.
    if weight.dtype != x.dtype or not x.numel():
        return triton_norm.rms_norm(x, weight, eps)
    out: Tensor = _RMS_NORM(_rows(x), weight, eps)
    return out.view(x.shape)


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    if weight.dtype != x.dtype or not x.numel():
        return triton_norm.fused_add_rms_norm(x, residual, weight, eps)
    rows = _rows(x)
    normed, total = torch.empty_like(rows), torch.empty_like(rows)
    _ADD_RMS_NORM(normed, rows, _rows(residual), total, weight, eps)
    return normed.view(x.shape), total.view(x.shape)


def _rows(x: Tensor) -> Tensor:
    """[rows, width], dense: some releases fault on views of wider tensors."""
    return x.reshape(-1, x.shape[-1]).contiguous()
