"""The matrix product through ``linear.c``."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from cardan.platforms.cpu.huge_pages import WeightMemory
from cardan.platforms.cpu.native.library import (
    NativeLibrary,
    Pointer,
    Size,
    check,
    library,
)

# Numbers of the types in ``simd.h``.
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def make_linear(native: NativeLibrary) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """The operation ``linear`` by the kernels of ``native``.

    A row's result depends neither on the rows beside it nor on the number of threads. Sums are
    float32. What the kernels do not know (other dtypes, mixed ones, other devices, a weight that
    is not contiguous) is torch's, and so are the errors for shapes that do not fit.
    """
    multiply = native.function(
        "cardan_linear",
        *(Pointer, Pointer, Pointer, Pointer),
        *(Size, Size, Size, Size, Size),
        reads=_weight_of,
    )
    kinds = TYPES
    num_threads = torch.get_num_threads

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # Each look at a tensor costs as much as 50 weights, so this is done by hand.
        dtype = x.dtype
        shape = x.shape
        if (
            dtype not in kinds
            or weight.dtype is not dtype
            or weight.dim() != 2
            or not (x.is_cpu and weight.is_cpu and weight.is_contiguous())
        ):
            return functional.linear(x, weight, bias)
        outputs, inputs = weight.shape
        if not inputs or not shape or shape[-1] != inputs:
            return functional.linear(x, weight, bias)
        if not x.is_contiguous():
            x = x.contiguous()
        if bias is not None:
            if bias.dtype is not dtype or bias.shape != (outputs,) or not bias.is_cpu:
                return functional.linear(x, weight, bias)
            bias = bias.contiguous()
        if len(shape) == 2:
            rows = shape[0]
            out = x.new_empty(rows, outputs)
        else:
            rows = x.numel() // inputs
            out = x.new_empty(*shape[:-1], outputs)
        status = multiply(
            out.data_ptr(),
            x.data_ptr(),
            weight.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            rows,
            inputs,
            outputs,
            kinds[dtype],
            num_threads(),
        )
        if status:
            check(status)
        return out

    return linear


def _weight_of(fields: tuple[Any, ...]) -> tuple[int, int]:
    _, _, weight, _, _, inputs, outputs, kind, _ = fields
    return weight, inputs * outputs * (2 if kind else 4)


linear = make_linear(library())
_MEMORY = WeightMemory()


def prepare_linear(
    weight: Tensor, in_features: int = 0, out_features: int = 0, dtype: str = ""
) -> Tensor:
    """The weight where it is read fastest; sizes and dtype are its own."""
    return _MEMORY.place(weight)
