"""Gated activations and the soft cap; computed in (at least) float32, results in x's dtype."""

import torch
from torch import Tensor
from torch.nn import functional


def silu_and_mul(x: Tensor) -> Tensor:
    """SiLU of the first half of x [..., 2I] times the second half: [..., I].

    Attributes of use: ``dtype``, ``hidden`` (I).
    """
    gate, up = _wide(x).chunk(2, dim=-1)
    return functional.silu(gate).mul_(up).to(x.dtype)


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    """GELU (tanh form) of the first half of x [..., 2I] times the second half: [..., I].

    Attributes of use: ``dtype``, ``hidden`` (I).
    """
    gate, up = _wide(x).chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh").mul_(up).to(x.dtype)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap): close to x near 0 and within (-cap, cap). Attributes of use:
    ``dtype``, ``hidden`` (size of the last dimension)."""
    return torch.tanh(_wide(x) / cap).mul_(cap).to(x.dtype)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
