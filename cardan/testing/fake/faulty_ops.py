"""The operations of the faulty providers."""

import random

import torch
from torch import Tensor

# Elements that the faulty norm forgets, as a kernel without a tail loop would.
_TAIL = 8


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The sum of squares lacks the last elements: a few per cent off."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    mean = wide[..., :-_TAIL].square().sum(-1, keepdim=True) / x.shape[-1]
    return (wide * torch.rsqrt(mean + eps) * weight.to(wide.dtype)).to(x.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Right within tolerance, but the terms of each sum are added in a new order every time."""
    order = list(range(x.shape[-1]))
    random.SystemRandom().shuffle(order)
    places = torch.tensor(order, device=x.device)
    shuffled = x.index_select(-1, places)
    return torch.nn.functional.linear(shuffled, weight.index_select(-1, places), bias)
