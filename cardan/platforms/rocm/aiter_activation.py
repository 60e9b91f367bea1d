"""Gated activations by the kernels of AITER; arguments and results as the operations are defined.

Never run on hardware by those who wrote this; where a kernel does not agree with the operation's
definition on first use, the next provider serves it.
"""

import torch
from torch import Tensor

from cardan.core.interfaces.kernels import Kernel
from cardan.platforms.rocm.aiter_import import aiter_function

_SILU_AND_MUL = aiter_function("silu_and_mul")
_GELU_TANH_AND_MUL = aiter_function("gelu_tanh_and_mul")


def silu_and_mul(x: Tensor) -> Tensor:
    return _gated(_SILU_AND_MUL, x)


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    return _gated(_GELU_TANH_AND_MUL, x)


def _gated(kernel: Kernel, x: Tensor) -> Tensor:
    # The kernels take no strides, and a launch of no rows is an error.
    out = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)
    if x.numel():
        kernel(out, x.contiguous())
    return out
