"""Operations by the kernels of ``vllm-xpu-kernels``; arguments and results as they are defined.

Never run on hardware by those who wrote this; where a kernel does not agree with the operation's
definition on first use, the next provider serves it.
"""

from importlib import import_module

import torch
from torch import Tensor

from cardan.core.interfaces.errors import UnsupportedError
from cardan.core.interfaces.kernels import Kernel
from cardan.platforms.shared.triton import norm as triton_norm

try:
    import_module("vllm_xpu_kernels._C")
    _OPS = torch.ops._C  # noqa: SLF001 (the namespace that the package chose)
    _KERNELS = (
        _OPS.rms_norm,
        _OPS.fused_add_rms_norm,
        _OPS.silu_and_mul,
        _OPS.gelu_tanh_and_mul,
    )
except (ImportError, OSError, AttributeError) as error:
    raise UnsupportedError(
        f"vllm-xpu-kernels does not load beside torch {torch.__version__}: {error}"
    ) from error
_RMS_NORM, _ADD_RMS_NORM, _SILU_AND_MUL, _GELU_TANH_AND_MUL = _KERNELS


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    # The kernels read a weight of x's dtype; a wide one would lose digits.
    if weight.dtype != x.dtype:
        return triton_norm.rms_norm(x, weight, eps)
    rows = _rows(x)
    out = torch.empty_like(rows)
    _RMS_NORM(out, rows, weight, eps)
    return out.view(x.shape)


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    if weight.dtype != x.dtype:
        return triton_norm.fused_add_rms_norm(x, residual, weight, eps)
    # The kernel writes over both.
    normed = x.clone(memory_format=torch.contiguous_format)
    total = residual.clone(memory_format=torch.contiguous_format)
    _ADD_RMS_NORM(_rows(normed), _rows(total), weight, eps)
    return normed, total


def silu_and_mul(x: Tensor) -> Tensor:
    return _gated(_SILU_AND_MUL, x)


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    return _gated(_GELU_TANH_AND_MUL, x)


def _gated(kernel: Kernel, x: Tensor) -> Tensor:
    rows = _rows(x)
    out = torch.empty(len(rows), rows.shape[1] // 2, dtype=x.dtype, device=x.device)
    kernel(out, rows)
    return out.view(*x.shape[:-1], -1)


def _rows(x: Tensor) -> Tensor:
    """[rows, width], dense."""
    return x.reshape(-1, x.shape[-1]).contiguous()
