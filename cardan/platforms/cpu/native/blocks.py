"""Products with, and look-ups in, weights in quantised blocks through ``block_*.c``.

Weights are packed once, into as many bits as are stored or little more (q3_k 4 %, q4_k 3 %, q5_k
2 %), rows padded to whole tiles. Activations are rounded to 8 bits in blocks of 32 (for int8: in
rows) with one scale, absmax / 127, products summed as whole numbers in a block and in float32
across blocks. A row's result depends neither on the rows beside it nor on the number of threads. A
row with what is not finite gives NaN; magnitudes below 2^-100 count as zero.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cardan.core.types.ggml import block_format
from cardan.platforms.cpu.huge_pages import WeightMemory
from cardan.platforms.cpu.native.library import (
    NativeFunction,
    NativeLibrary,
    Pointer,
    Size,
    check,
    library,
)
from cardan.platforms.cpu.stored_blocks import bad_activations, check_stored

# Numbers of the types in ``simd.h`` and of the formats in ``block_format.h``.
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_FORMATS = {
    "q4_0": 0,
    "q4_1": 1,
    "q5_0": 2,
    "q5_1": 3,
    "q8_0": 4,
    "iq4_nl": 5,
    "q2_k": 6,
    "q3_k": 7,
    "q4_k": 8,
    "q5_k": 9,
    "q6_k": 10,
}
_INT8 = 11
_NAMES = {number: name for name, number in _FORMATS.items()}
# Sums of products of a row are whole numbers of 32 bits.
_MOST_INT8_INPUTS = (2**31 - 1) // (128 * 127)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [out_features, in_features] in tiles, ready for the kernels of this process.

    ``format`` is the kernels' number of it. ``address`` is that of ``data``, which owns the memory.
    """

    data: Tensor
    address: int
    format: int
    in_features: int
    out_features: int


class BlockKernels:
    """The operations of these names by the kernels of ``native``, and what prepares for them;
    their definitions are the catalogue's."""

    def __init__(self, native: NativeLibrary) -> None:
        self._memory = WeightMemory()
        self._size = native.function("cardan_block_size", Pointer, *[Size] * 3)
        self._pack = native.function("cardan_block_pack", *[Pointer] * 2, *[Size] * 5)
        self._rows = native.function("cardan_block_rows", *[Pointer] * 3, *[Size] * 7)
        multiply = native.function(
            "cardan_block_linear", *[Pointer] * 5, *[Size] * 7, reads=_weight_of
        )
        self.block_linear = _make_block_linear(multiply)
        self.int8_linear = _make_int8_linear(multiply)

    def prepare_blocks(
        self, weight: Tensor, format: str, in_features: int, out_features: int, dtype: str = ""
    ) -> PackedWeight:
        """Pack stored rows, uint8 [out_features, row bytes] (rows may lie apart).

        ``dtype``, that of the activations, does not matter.

        Raises:
            ValueError: the format is not known, or the weight does not have these sizes.
        """
        check_stored(weight, format, in_features, _FORMATS)
        if weight.shape[0] != out_features:
            raise ValueError(f"weight has {weight.shape[0]} rows, out_features is {out_features}")
        return self._packed(weight, _FORMATS[format], in_features)

    def prepare_int8(
        self, weight: Tensor, in_features: int = 0, out_features: int = 0, dtype: str = ""
    ) -> PackedWeight:
        """Pack rows of int8 [out_features, in_features]; the sizes are the weight's own.

        Raises:
            ValueError: the weight is no int8 matrix, or too wide for sums of 32 bits.
        """
        if weight.dtype is not torch.int8 or weight.dim() != 2 or not weight.is_cpu:
            raise ValueError(
                f"weight must be an int8 matrix on the host, got {weight.dtype} "
                f"{tuple(weight.shape)} on {weight.device}"
            )
        if not 0 < weight.shape[1] <= _MOST_INT8_INPUTS:
            raise ValueError(
                f"in_features must be 1 to {_MOST_INT8_INPUTS}, got {weight.shape[1]}; "
                "use blocks (q8) for wider layers"
            )
        return self._packed(weight, _INT8, weight.shape[1])

    def block_embedding(
        self, token_ids: Tensor, weight: Tensor, format: str, dtype: torch.dtype
    ) -> Tensor:
        """Rows ``token_ids`` of a stored table, decoded and rounded once to ``dtype``."""
        kind = _TYPES.get(dtype)
        block = check_stored(weight, format, None, _FORMATS)
        if kind is None or token_ids.dtype is not torch.int64:
            raise ValueError(
                "dtype must be float32, bfloat16 or float16 and token_ids int64, got "
                f"{dtype} and {token_ids.dtype}"
            )
        hidden = weight.shape[1] // block.nbytes * block.elements
        token_ids = token_ids.contiguous()
        out = torch.empty((*token_ids.shape, hidden), dtype=dtype)
        status = self._rows(
            out.data_ptr(),
            weight.data_ptr(),
            token_ids.data_ptr(),
            token_ids.numel(),
            weight.shape[0],
            hidden,
            weight.stride(0),
            _FORMATS[format],
            kind,
            torch.get_num_threads(),
        )
        if status:
            raise IndexError(
                f"token ids must lie in [0, {weight.shape[0]}), the rows of the table; got "
                f"{int(token_ids.min())} to {int(token_ids.max())}"
            )
        return out

    def _packed(self, weight: Tensor, format: int, in_features: int) -> PackedWeight:
        if weight.stride(1) != 1:
            weight = weight.contiguous()
        out_features = weight.shape[0]
        size = torch.zeros(1, dtype=torch.int64)
        self._size(size.data_ptr(), out_features, in_features, format)
        data = self._memory.empty(int(size))
        self._pack(
            data.data_ptr(),
            weight.data_ptr(),
            out_features,
            in_features,
            weight.stride(0),
            format,
            torch.get_num_threads(),
        )
        return PackedWeight(data, data.data_ptr(), format, in_features, out_features)


def _weight_of(fields: tuple[Any, ...]) -> tuple[int, int]:
    _, _, weight, _, _, _, inputs, outputs, _, number, _, _ = fields
    if number == _INT8:
        return weight, inputs * outputs
    block = block_format(_NAMES[number])
    return weight, inputs * outputs // block.elements * block.nbytes


def _make_block_linear(
    multiply: NativeFunction,
) -> Callable[[Tensor, PackedWeight, Tensor | None, str], Tensor]:
    kinds = _TYPES
    empty = torch.empty
    num_threads = torch.get_num_threads

    def block_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None, format: str) -> Tensor:
        # Each look at a tensor costs as much as 100 weights, so this is done by hand.
        dtype = x.dtype
        kind = kinds.get(dtype)
        inputs = weight.in_features
        outputs = weight.out_features
        shape = x.shape
        if kind is None or not shape or shape[-1] != inputs or not x.is_cpu:
            raise bad_activations(x, inputs)
        if bias is not None:
            bias = _dense_bias(bias, dtype, outputs)
        if len(shape) == 2 and x.stride(1) == 1:
            rows, stride = shape[0], x.stride(0)
            out = empty(rows, outputs, dtype=dtype)
        else:
            x = x.contiguous()
            rows, stride = x.numel() // inputs, inputs
            out = empty(*shape[:-1], outputs, dtype=dtype)
        status = multiply(
            out.data_ptr(),
            x.data_ptr(),
            weight.address,
            0 if bias is None else bias.data_ptr(),
            0,
            rows,
            inputs,
            outputs,
            stride,
            weight.format,
            kind,
            num_threads(),
        )
        if status:
            check(status)
        return out

    return block_linear


def _make_int8_linear(
    multiply: NativeFunction,
) -> Callable[[Tensor, PackedWeight, Tensor, Tensor | None], Tensor]:
    kinds = _TYPES

    def int8_linear(x: Tensor, weight: PackedWeight, scales: Tensor, bias: Tensor | None) -> Tensor:
        kind = kinds.get(x.dtype)
        inputs, outputs = weight.in_features, weight.out_features
        shape = x.shape
        if kind is None or not shape or shape[-1] != inputs or not x.is_cpu:
            raise bad_activations(x, inputs)
        if scales.dtype is not torch.float32 or scales.shape != (outputs,):
            raise ValueError(
                f"scales must be float32 ({outputs},), got {scales.dtype} {tuple(scales.shape)}"
            )
        scales = scales.contiguous()
        if bias is not None:
            bias = _dense_bias(bias, x.dtype, outputs)
        if len(shape) != 2 or x.stride(1) != 1:
            x = x.contiguous()
        rows = x.numel() // inputs
        out = torch.empty((*shape[:-1], outputs), dtype=x.dtype)
        status = multiply(
            out.data_ptr(),
            x.data_ptr(),
            weight.address,
            0 if bias is None else bias.data_ptr(),
            scales.data_ptr(),
            rows,
            inputs,
            outputs,
            x.stride(0) if len(shape) == 2 else inputs,
            weight.format,
            kind,
            torch.get_num_threads(),
        )
        if status:
            check(status)
        return out

    return int8_linear


def _dense_bias(bias: Tensor, dtype: torch.dtype, outputs: int) -> Tensor:
    if bias.dtype is not dtype or bias.shape != (outputs,):
        raise ValueError(f"bias must be {dtype} ({outputs},), got {bias.dtype} {tuple(bias.shape)}")
    return bias.contiguous()


_KERNELS = BlockKernels(library())
block_linear = _KERNELS.block_linear
int8_linear = _KERNELS.int8_linear
block_embedding = _KERNELS.block_embedding
prepare_blocks = _KERNELS.prepare_blocks
prepare_int8 = _KERNELS.prepare_int8
