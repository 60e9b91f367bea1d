"""``linear_float32`` on NVIDIA's GPUs: logits are stored as they were summed."""

import torch
from torch import Tensor

from cardan.platforms.shared.triton.linear import few_rows


def linear_float32(x: Tensor, weight: Tensor) -> Tensor:
    """Saves a pass over all logits besides a rounding: on an H200 70 of 500 microseconds for 256
    rows of 4096 numbers and 128256 outputs, 160 of 1040 for 512."""
    out = few_rows(x, weight, None, torch.float32)
    if out is not None:
        return out
    rows = x.reshape(-1, x.shape[-1])
    return torch.mm(rows, weight.t(), out_dtype=torch.float32).view(*x.shape[:-1], len(weight))
