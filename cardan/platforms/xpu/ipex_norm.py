"""Norms by the kernels of intel-extension-for-pytorch; arguments and results as the operations are
defined.

Never run on hardware by those who wrote this; where a kernel does not agree with the operation's
definition on first use, the next provider serves it.
"""

import torch
from torch import Tensor

from cardan.core.interfaces.errors import UnsupportedError
from cardan.platforms.shared.triton import norm as triton_norm
from cardan.platforms.xpu.ipex_import import ipex_functions

try:
    _FUNCTIONS = ipex_functions()
    _RMS_NORM, _ADD_RMS_NORM = _FUNCTIONS.rms_norm, _FUNCTIONS.add_rms_norm
except AttributeError as error:
    raise UnsupportedError(f"this intel-extension-for-pytorch is too old: {error}") from error


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    # The kernels read a weight of x's dtype; a wide one would lose digits.
    if weight.dtype != x.dtype or not x.numel():
        return triton_norm.rms_norm(x, weight, eps)
    out: Tensor = _RMS_NORM(_rows(x), weight, eps)
    return out.view(x.shape)


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    if weight.dtype != x.dtype or not x.numel():
        return triton_norm.fused_add_rms_norm(x, residual, weight, eps)
    # The sum is written over what is added to.
    total = residual.clone(memory_format=torch.contiguous_format)
    normed: Tensor = _ADD_RMS_NORM(_rows(total), _rows(x), weight, None, eps, True)
    return normed.view(x.shape), total


def _rows(x: Tensor) -> Tensor:
    """[rows, width], dense."""
    return x.reshape(-1, x.shape[-1]).contiguous()
