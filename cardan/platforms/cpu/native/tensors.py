"""Tensors as the kernels take them."""

import torch
from torch import Tensor

# Numbers of the element types in C (``simd.h``).
ELEMENT_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def type_code(x: Tensor) -> int:
    """
    Raises:
        ValueError: the kernels have no such element type.
    """
    code = ELEMENT_TYPES.get(x.dtype)
    if code is None:
        raise ValueError(f"x must be float32, bfloat16 or float16, got {x.dtype}")
    return code


def dense_weight(weight: Tensor, x: Tensor, size: int) -> tuple[Tensor, int]:
    """``weight`` [size] as the kernels take it: dense in x's dtype (and 0), or in float32 (1).

    Raises:
        ValueError: it has another shape.
    """
    if weight.shape != (size,):
        raise ValueError(f"weight must be ({size},), got {tuple(weight.shape)}")
    if weight.dtype is x.dtype:
        return weight.contiguous(), 0
    return weight.to(torch.float32).contiguous(), 1
