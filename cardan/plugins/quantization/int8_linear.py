"""A linear layer of 8-bit numbers with a scale for each output."""

import torch

from cardan.core.interfaces.quantization import LinearMethod
from cardan.plugins.quantization.layer import Layer
from cardan.plugins.quantization.quantizers import quantize_int8


class Int8Linear(LinearMethod):
    """Quantises rows as they come; the operation ``int8_linear`` applies them."""

    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        self._use: dict[str, int | float | str | bool] = {
            "dtype": layer.dtype,
            "in_features": layer.in_features,
            "out_features": layer.out_features,
        }
        self._run = layer.ops.bind("int8_linear", **self._use)
        shape = (layer.out_features, layer.in_features)
        # As loaded; what the kernel takes is made of them.
        self._numbers = torch.empty(shape, dtype=torch.int8)
        self._scales = torch.empty(layer.out_features, dtype=torch.float32)
        self._num_loaded = 0
        self._weight: object = None

    def load(self, row: int, weight: torch.Tensor) -> None:
        rows = slice(row, row + weight.shape[0])
        self._numbers[rows], self._scales[rows] = quantize_int8(weight)
        self._num_loaded += weight.shape[0]
        if self._num_loaded == self._layer.out_features:
            self._pack()

    def finish(self) -> None:
        if self._weight is None:
            raise RuntimeError(f"{self._num_loaded} of {self._layer.out_features} rows were loaded")

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out: torch.Tensor = self._run(x, self._weight, self._scales, bias)
        return out

    def _pack(self) -> None:
        layer = self._layer
        numbers = self._numbers.to(layer.device)
        self._weight = layer.ops.prepare("int8_linear", numbers, **self._use)
        self._scales = self._scales.to(layer.device)
        # Given up, where the kernel keeps a form of its own.
        self._numbers = self._numbers.new_empty(0)
