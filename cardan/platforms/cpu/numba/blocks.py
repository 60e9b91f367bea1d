"""Products with, and look-ups in, weights in quantised blocks, compiled by numba.

Weights are taken apart once into codes of 4 or 8 bits and factors of groups in float32: 6 or 10
bits for a weight (8 or 12 in formats with groups of 16). Activations of few rows are rounded to 8
bits in those groups; a row with what is not finite gives NaN, and magnitudes below 2^-100 count as
zero. Of many rows torch computes the product, with some of the weight decoded at a time.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cardan.platforms.cpu.numba.block_kernel import LANES, multiply
from cardan.platforms.cpu.numba.block_kernel import decode as decode_tiles
from cardan.platforms.cpu.numba.codes import CODE_FORMATS, Bytes, Floats, decode, take_apart
from cardan.platforms.cpu.stored_blocks import bad_activations, check_stored

Words = npt.NDArray[np.int16]
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Rows of a weight that are packed at a time, so that scratch stays small.
_ROWS_AT_A_TIME = 32 * LANES
# Rows of activations from which on decoding costs less than multiplying with codes.
_MANY_ROWS = 8
# Decoded weights at a time: what a core's cache holds.
_DECODED = 1 << 19


@dataclass(frozen=True, slots=True)
class CodedWeight:
    """A weight [out_features, in_features] in tiles of ``LANES`` rows, of which the last may be
    padded.

    ``words``: int16 [tile, run of 16 inputs, plane of 4 bits, 4, LANES], each four codes of
    neighbouring inputs, the first in the lowest bits. ``factors``: float32 [tile, group, 2, LANES],
    scales and minima.
    """

    words: Tensor
    factors: Tensor
    planes: int
    group: int
    in_features: int
    out_features: int


def prepare_blocks(
    weight: Tensor, format: str, in_features: int, out_features: int, dtype: str = ""
) -> CodedWeight:
    """Take stored rows apart, uint8 [out_features, row bytes] (rows may lie apart).

    ``dtype``, that of the activations, does not matter.

    Raises:
        ValueError: the format is not known, or the weight does not have these sizes.
    """
    check_stored(weight, format, in_features, CODE_FORMATS)
    if weight.shape[0] != out_features:
        raise ValueError(f"weight has {weight.shape[0]} rows, out_features is {out_features}")
    kind = CODE_FORMATS[format]
    tiles = -(-out_features // LANES)
    groups = in_features // kind.group
    words = np.empty((tiles, in_features // 16, kind.planes, 4, LANES), np.int16)
    factors = np.empty((tiles, groups, 2, LANES), np.float32)
    rows = weight.numpy()
    for start in range(0, out_features, _ROWS_AT_A_TIME):
        part = slice(start // LANES, (start + _ROWS_AT_A_TIME) // LANES)
        _pack(rows[start : start + _ROWS_AT_A_TIME], format, words[part], factors[part])
    return CodedWeight(
        torch.from_numpy(words),
        torch.from_numpy(factors),
        kind.planes,
        kind.group,
        in_features,
        out_features,
    )


def block_linear(x: Tensor, weight: CodedWeight, bias: Tensor | None, format: str) -> Tensor:
    inputs, outputs = weight.in_features, weight.out_features
    if x.dtype not in _DTYPES or not x.dim() or x.shape[-1] != inputs or not x.is_cpu:
        raise bad_activations(x, inputs)
    wide = x if x.dtype is torch.float32 else x.to(torch.float32)
    if x.dim() != 2 or not x.is_contiguous():
        wide = wide.reshape(-1, inputs).contiguous()
    if wide.shape[0] < _MANY_ROWS:
        out = _product(wide, weight)
    else:
        out = _decoded_product(wide, weight)
    if bias is not None:
        out += bias
    if x.dtype is not torch.float32:
        out = out.to(x.dtype)
    return out if x.dim() == 2 else out.view(*x.shape[:-1], outputs)


def _product(x: Tensor, weight: CodedWeight) -> Tensor:
    rows, inputs = x.shape
    out = torch.empty((rows, weight.out_features), dtype=torch.float32)
    multiply(
        torch.get_num_threads(),
        out.data_ptr(),
        x.data_ptr(),
        weight.words.data_ptr(),
        weight.factors.data_ptr(),
        rows,
        inputs,
        weight.out_features,
        weight.planes,
        weight.group,
    )
    return out


def _decoded_product(x: Tensor, weight: CodedWeight) -> Tensor:
    rows, inputs = x.shape
    outputs = weight.out_features
    out = torch.empty((rows, outputs), dtype=torch.float32)
    at_a_time = max(torch.get_num_threads(), _DECODED // (inputs * LANES))
    for tile in range(0, weight.words.shape[0], at_a_time):
        words, factors = weight.words[tile:][:at_a_time], weight.factors[tile:][:at_a_time]
        tiles = words.shape[0]
        values = torch.empty((inputs, tiles * LANES), dtype=torch.float32)
        decode_tiles(
            torch.get_num_threads(),
            values.data_ptr(),
            words.data_ptr(),
            factors.data_ptr(),
            inputs,
            tiles,
            weight.planes,
            weight.group,
        )
        part = out[:, tile * LANES : (tile + tiles) * LANES]
        torch.mm(x, values[:, : part.shape[1]], out=part)
    return out


def block_embedding(token_ids: Tensor, weight: Tensor, format: str, dtype: torch.dtype) -> Tensor:
    """Rows ``token_ids`` of a stored table, decoded and rounded once to ``dtype``."""
    check_stored(weight, format, None, CODE_FORMATS)
    rows = weight.index_select(0, token_ids.flatten()).numpy()
    decoded = torch.from_numpy(decode(rows, format))
    return decoded.to(dtype).view(*token_ids.shape, decoded.shape[1])


def _pack(rows: Bytes, format: str, words: Words, factors: Floats) -> None:
    """Fill the parts of a `CodedWeight` that belong to ``rows``, whose number need not fill the
    last tile."""
    kind = CODE_FORMATS[format]
    tiles, groups = factors.shape[:2]
    padded = np.zeros((tiles * LANES, rows.shape[1]), np.uint8)
    padded[: len(rows)] = rows
    whole, scales, minima = take_apart(padded, format)
    whole, minima = whole - kind.lowest, minima + kind.lowest * scales
    factors[:, :, 0] = scales.reshape(tiles, LANES, groups).transpose(0, 2, 1)
    factors[:, :, 1] = minima.reshape(tiles, LANES, groups).transpose(0, 2, 1)
    four = whole.astype(np.uint16).reshape(tiles, LANES, -1, 4, 4)
    for plane in range(kind.planes):
        digits = (four >> (4 * plane)) & 15
        joined = digits[..., 0] | digits[..., 1] << 4 | digits[..., 2] << 8 | digits[..., 3] << 12
        words[:, :, plane] = joined.view(np.int16).transpose(0, 2, 3, 1)
