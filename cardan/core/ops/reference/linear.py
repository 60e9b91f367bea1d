"""Table look-up and matrix product."""

import torch
from torch import Tensor


def embedding(token_ids: Tensor, weight: Tensor) -> Tensor:
    """Rows ``token_ids`` [T] int64 of weight [V, H]: [T, H]. Attributes of use: ``dtype``,
    ``hidden`` (H)."""
    return weight.index_select(0, token_ids)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., I] times the transpose of weight [O, I], plus bias [O]: [..., O].

    Attributes of use: ``dtype``, ``in_features`` (I), ``out_features`` (O).
    """
    return torch.nn.functional.linear(x, weight, bias)
