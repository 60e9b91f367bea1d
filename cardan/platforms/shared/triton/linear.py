"""Products with one row of activations, as ``linear`` is defined; the library has the others."""

import torch
from torch import Tensor
from torch.nn import functional

from cardan.platforms.shared.triton.kernels.gemv import gemv_kernel
from cardan.platforms.shared.triton.rows import power_of_two

_BLOCK = 1024
_WARPS = 4
# With fewer outputs than this a program takes fewer of them, so that there are enough programs.
_MANY_OUTPUTS = 8192


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    outputs, inputs = weight.shape
    if x.numel() != inputs or not inputs or weight.stride(1) != 1:
        return functional.linear(x, weight, bias)
    out = torch.empty((*x.shape[:-1], outputs), dtype=x.dtype, device=x.device)
    taken = 4 if outputs >= _MANY_OUTPUTS else 2
    gemv_kernel[(-(-outputs // taken),)](
        x if x.stride(-1) == 1 else x.contiguous(),
        weight,
        out if bias is None else bias,
        out,
        outputs,
        weight.stride(0),
        INPUTS=inputs,
        OUTPUTS=taken,
        BLOCK=min(_BLOCK, power_of_two(inputs)),
        HAS_BIAS=bias is not None,
        num_warps=_WARPS,
    )
    return out
