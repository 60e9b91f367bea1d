"""The matrix product through ``linear*.c``, with weights that were packed once."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from cardan.platforms.cpu.huge_pages import WeightMemory
from cardan.platforms.cpu.native.library import (
    NativeFunction,
    NativeLibrary,
    Pointer,
    Size,
    check,
    library,
)

# Numbers of the types in ``simd.h``.
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """A weight [out_features, in_features] in the order in which the kernels of this process read
    it: with the same number of bits, rows and columns padded to whole tiles.

    ``address`` is that of ``data``, which owns the memory.
    """

    data: Tensor
    address: int
    dtype: torch.dtype
    in_features: int
    out_features: int


class LinearKernels:
    """The operation ``linear`` by the kernels of ``native``, and what prepares its weights.

    A row's result depends neither on the rows beside it nor on the number of threads. Sums are
    float32. A weight that was not prepared is packed for the call, which gives the same result,
    slowly. What the kernels do not know (other dtypes, mixed ones, other devices) is torch's, and
    so are the errors for shapes that do not fit.
    """

    def __init__(self, native: NativeLibrary) -> None:
        self._memory = WeightMemory()
        self._tiles = _read_tiles(native)
        self._pack = native.function("cardan_linear_pack", *[Pointer] * 2, *[Size] * 4)
        multiply = native.function("cardan_linear", *[Pointer] * 4, *[Size] * 5, reads=_weight_of)
        self.linear = _make_linear(multiply, self._packed_for_a_call)

    def prepare_linear(
        self, weight: Tensor, in_features: int = 0, out_features: int = 0, dtype: str = ""
    ) -> DenseWeight | Tensor:
        """The weight as the kernels read it fastest; sizes and dtype are its own.

        What the kernels do not know stays as it is.
        """
        if not _is_known(weight):
            return weight
        size = self._packed_size(weight)
        if size:
            data = self._packed(weight, self._memory.empty(size))
        else:
            data = self._memory.place(weight.contiguous())
        return _described(weight, data)

    def _packed_for_a_call(self, weight: Tensor) -> DenseWeight | None:
        """None if the kernels do not know such a weight."""
        if not _is_known(weight):
            return None
        size = self._packed_size(weight)
        if not size:
            return _described(weight, weight.contiguous())
        # Of torch, so that captured work has memory for it.
        return _described(weight, self._packed(weight, weight.new_empty(size, dtype=torch.uint8)))

    def _packed_size(self, weight: Tensor) -> int:
        """In bytes; 0 where weights are read as they are stored."""
        numbers = weight.element_size()
        for size, unit in zip(weight.shape, self._tiles[weight.dtype], strict=True):
            numbers *= -(-size // unit) * unit if unit else 0
        return numbers

    def _packed(self, weight: Tensor, data: Tensor) -> Tensor:
        weight = weight.contiguous()
        outputs, inputs = weight.shape
        self._pack(
            data.data_ptr(),
            weight.data_ptr(),
            inputs,
            outputs,
            TYPES[weight.dtype],
            torch.get_num_threads(),
        )
        return data


def _read_tiles(native: NativeLibrary) -> dict[torch.dtype, ctypes.Array[ctypes.c_int64]]:
    """Outputs and inputs to whose multiples packed weights are padded, by dtype.

    They stay where they were written: should a graph be captured meanwhile, it writes them again.
    """
    layout = native.function("cardan_linear_layout", Pointer, Size)
    tiles = {}
    for dtype, kind in TYPES.items():
        tile = (ctypes.c_int64 * 2)()
        check(layout(ctypes.addressof(tile), kind))
        tiles[dtype] = tile
    return tiles


def _is_known(weight: Tensor) -> bool:
    return weight.dtype in TYPES and weight.dim() == 2 and weight.is_cpu and weight.numel() > 0


def _described(weight: Tensor, data: Tensor) -> DenseWeight:
    outputs, inputs = weight.shape
    return DenseWeight(data, data.data_ptr(), weight.dtype, inputs, outputs)


def _weight_of(fields: tuple[Any, ...]) -> tuple[int, int]:
    _, _, weight, _, _, inputs, outputs, kind, _ = fields
    return weight, inputs * outputs * (2 if kind else 4)


def _make_linear(
    multiply: NativeFunction, pack: Callable[[Tensor], DenseWeight | None]
) -> Callable[[Tensor, DenseWeight | Tensor, Tensor | None], Tensor]:
    kinds = TYPES
    num_threads = torch.get_num_threads

    def linear(x: Tensor, weight: DenseWeight | Tensor, bias: Tensor | None) -> Tensor:
        if isinstance(weight, Tensor):
            packed = pack(weight)
            if packed is None or not _fit(x, packed, bias):
                return functional.linear(x, weight, bias)
            weight = packed
        # Each look at a tensor costs as much as 50 weights, so this is done by hand.
        dtype = x.dtype
        shape = x.shape
        inputs = weight.in_features
        outputs = weight.out_features
        if dtype is not weight.dtype or not shape or shape[-1] != inputs or not x.is_cpu:
            raise _bad_activations(x, weight)
        if not x.is_contiguous():
            x = x.contiguous()
        if bias is not None:
            if bias.dtype is not dtype or bias.shape != (outputs,) or not bias.is_cpu:
                raise _bad_bias(bias, weight)
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
            weight.address,
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


def _fit(x: Tensor, weight: DenseWeight, bias: Tensor | None) -> bool:
    if x.dtype is not weight.dtype or not x.is_cpu or x.shape[-1:] != (weight.in_features,):
        return False
    if bias is None:
        return True
    return bias.dtype is x.dtype and bias.is_cpu and bias.shape == (weight.out_features,)


def _bad_activations(x: Tensor, weight: DenseWeight) -> ValueError:
    return ValueError(
        f"x must be {weight.dtype} (..., {weight.in_features}) on the host, as the weight is; got "
        f"{x.dtype} {tuple(x.shape)} on {x.device}"
    )


def _bad_bias(bias: Tensor, weight: DenseWeight) -> ValueError:
    return ValueError(
        f"bias must be {weight.dtype} ({weight.out_features},) on the host, as the weight is; got "
        f"{bias.dtype} {tuple(bias.shape)} on {bias.device}"
    )


_KERNELS = LinearKernels(library())
linear = _KERNELS.linear
prepare_linear = _KERNELS.prepare_linear
