"""Table look-up and matrix product."""

from collections.abc import Mapping

import torch
from torch import Tensor

from cardan.core.interfaces.kernels import Kernel


def embedding(token_ids: Tensor, weight: Tensor) -> Tensor:
    """Rows ``token_ids`` [T] int64 of weight [V, H]: [T, H]. Attributes of use: ``dtype``,
    ``hidden`` (H)."""
    return weight.index_select(0, token_ids)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., I] times the transpose of weight [O, I], plus bias [O]: [..., O].

    Attributes of use: ``dtype``, ``in_features`` (I), ``out_features`` (O).
    """
    return torch.nn.functional.linear(x, weight, bias)


def linear_float32(parts: Mapping[str, Kernel], x: Tensor, weight: Tensor) -> Tensor:
    """``linear`` without bias, its results in float32: [..., O]. A kernel of its own need not round
    its sums to x's dtype first.

    ``weight`` is what ``linear`` takes: as its provider prepared it, so a platform whose ``linear``
    prepares weights and that has a kernel for this needs one that takes that form. Attributes of
    use: as ``linear``.
    """
    out: Tensor = parts["to_float32"](parts["linear"](x, weight, None))
    return out
