"""A linear layer whose weights are rounded to a quantised form and kept in full precision."""

from collections.abc import Callable
from typing import ClassVar

import torch

from cardan.core.interfaces.torch_linear import DenseLinear
from cardan.plugins.quantization.layer import Layer


class RoundedLinear(DenseLinear):
    """Stands in where no kernel computes on the quantised form; ``rounding`` gives the values
    that the form has for rows of weights."""

    keeps_precision: ClassVar[bool] = False

    def __init__(self, layer: Layer, rounding: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(
            layer.ops, layer.in_features, layer.out_features, layer.torch_dtype, layer.device
        )
        self._rounding = rounding

    def load(self, row: int, weight: torch.Tensor) -> None:
        super().load(row, self._rounding(weight))
