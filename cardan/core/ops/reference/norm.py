"""Root-mean-square normalisation."""

from collections.abc import Mapping

import torch
from torch import Tensor

from cardan.core.interfaces.kernels import Kernel


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale x [..., H] to unit root mean square, then by weight [H].

    Computed in (at least) float32; the result has x's dtype. ``weight`` may be float32 while x is
    not. Attributes of use: ``dtype``, ``hidden`` (H).
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    values = x.to(wide)
    inverse_rms = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return (values * inverse_rms * weight.to(wide)).to(x.dtype)


def fused_add_rms_norm(
    parts: Mapping[str, Kernel], x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Add x [..., H] to residual [..., H] and normalise the sum: (normed, new residual).

    The sum is rounded to x's dtype before it is normalised. Attributes of use: as ``rms_norm``.
    """
    new_residual = x + residual
    return parts["rms_norm"](new_residual, weight, eps), new_residual
