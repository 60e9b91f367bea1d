"""Kernels of a Basalt. They get at the chip's memory at once, with no torch call for each step."""

import torch
from torch import Tensor

from cardan_basalt.torch_backend import BasaltTensor, held_by


def prepare_linear(weight: Tensor, **attributes: int | float | str | bool) -> Tensor:
    """The weight [O, I] as the chip's multiplier reads it: [I, O]."""
    return BasaltTensor(held_by(weight).t().contiguous())


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., I] times a prepared weight [I, O], plus bias [O]."""
    product = torch.matmul(held_by(x), held_by(weight))
    return BasaltTensor(product if bias is None else product.add_(held_by(bias)))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., H] scaled to unit root mean square in float32, then by weight [H]."""
    values, scale = held_by(x).float(), held_by(weight).float()
    return BasaltTensor(torch.rms_norm(values, scale.shape, scale, eps).to(x.dtype))
