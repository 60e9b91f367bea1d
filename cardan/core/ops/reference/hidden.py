"""What follows the last layer: values as float32, and whether rows are finite."""

import torch
from torch import Tensor


def to_float32(x: Tensor) -> Tensor:
    """x of any shape in float32; x itself where it is that already. Attributes of use: ``dtype``,
    ``hidden`` (size of the last dimension)."""
    return x.to(torch.float32)


def finite_rows(x: Tensor) -> Tensor:
    """Whether all of a row of x [T, H] is finite: bool [T]. Attributes of use: ``dtype``,
    ``hidden`` (H)."""
    return x.isfinite().all(-1)
