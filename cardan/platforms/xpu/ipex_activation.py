"""Gated activations by the kernels of intel-extension-for-pytorch; arguments and results as the
operations are defined.

Never run on hardware by those who wrote this; where a kernel does not agree with the operation's
definition on first use, the next provider serves it.
"""

import torch
from torch import Tensor

from cardan.core.interfaces.errors import UnsupportedError
from cardan.platforms.xpu.ipex_import import ipex_functions

ipex_functions()
try:
    _SILU_AND_MUL = torch.ops.torch_ipex.silu_and_mul
    _GELU_AND_MUL = torch.ops.torch_ipex.gelu_and_mul
except AttributeError as error:
    raise UnsupportedError(f"this intel-extension-for-pytorch is too old: {error}") from error


def silu_and_mul(x: Tensor) -> Tensor:
    out = _halved(x)
    if x.numel():
        _SILU_AND_MUL(x.contiguous(), out)
    return out


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    out = _halved(x)
    if x.numel():
        _GELU_AND_MUL(x.contiguous(), out, "tanh")
    return out


def _halved(x: Tensor) -> Tensor:
    return torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)
