"""Quantising full-precision weights to blocks of GGML, and to 8-bit numbers with a scale a row.

Layouts follow ggml's ``ggml-common.h``. All work on chunks that stay within a core's cache.
"""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

BLOCK: Final = 32
_CHUNK_ELEMENTS: Final = 1 << 16
# By how much of its range a block's ends are moved inwards at the start of a search for 4-bit
# numbers, and how often factor and offset are then fitted to the numbers and these rounded anew.
_SHRINKS: Final = (0.0, 0.05)
_FITS: Final = 2


def quantize_q8_0(weight: Tensor) -> Tensor:
    """weight [n, columns], columns a multiple of 32: uint8 [n, row bytes].

    Bit-equal to ggml's reference: the factor is absmax / 127, numbers round half away from zero.
    """
    return _in_blocks(weight, _q8_0, 2 + BLOCK)


def quantize_q4_1(weight: Tensor) -> Tensor:
    """weight [n, columns], columns a multiple of 32: uint8 [n, row bytes].

    Each block's factor and offset are searched for the least squared error: from its whole range
    and from a narrower one, numbers are rounded and factor and offset fitted to them in turn.
    """
    return _in_blocks(weight, _q4_1, 4 + BLOCK // 2)


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [n, columns] as int8 numbers and a float32 factor for each row, absmax / 127."""
    numbers = torch.empty(weight.shape, dtype=torch.int8)
    factors = torch.empty(weight.shape[0], dtype=torch.float32)
    step = max(1, _CHUNK_ELEMENTS // max(1, weight.shape[1]))
    for first in range(0, weight.shape[0], step):
        rows = weight[first : first + step].to(device="cpu", dtype=torch.float32)
        factor = rows.abs().amax(dim=1, keepdim=True).div_(127.0)
        factors[first : first + step] = factor[:, 0]
        numbers[first : first + step] = (rows * _inverse(factor)).round_()
    return numbers, factors


def _in_blocks(weight: Tensor, encode: Callable[[Tensor, Tensor], None], nbytes: int) -> Tensor:
    """``encode`` fills blocks, uint8 [m, nbytes], from values, float32 [32, m]: a block a column,
    because reductions and factors then run along the vectors."""
    num_rows, columns = weight.shape
    out = torch.empty(num_rows, columns // BLOCK * nbytes, dtype=torch.uint8)
    step = max(1, _CHUNK_ELEMENTS // columns)
    for first in range(0, num_rows, step):
        values = weight[first : first + step].to(device="cpu", dtype=torch.float32)
        blocks = out[first : first + step].view(-1, nbytes)
        encode(values.reshape(-1, BLOCK).t().contiguous(), blocks)
    return out


def _q8_0(values: Tensor, blocks: Tensor) -> None:
    factor = values.abs().amax(dim=0).div_(127.0)
    scaled = values * _inverse(factor)
    # Half away from zero, also where adding a half would round up to the next number.
    size = scaled.abs()
    whole = size.floor()
    whole += size.sub_(whole).mul_(2.0).floor_()
    blocks[:, :2] = _half_bytes(factor)
    blocks[:, 2:] = whole.copysign_(scaled).to(torch.int8).view(torch.uint8).t()


def _q4_1(values: Tensor, blocks: Tensor) -> None:
    low, high = values.amin(dim=0), values.amax(dim=0)
    width = high - low
    mean = values.mean(dim=0)
    centred = values - mean
    found = [_fitted(values, centred, mean, low, width, shrink) for shrink in _SHRINKS]
    error, factor, offset = found[0]
    for other_error, other_factor, other_offset in found[1:]:
        better = other_error < error
        error = torch.where(better, other_error, error)
        factor = torch.where(better, other_factor, factor)
        offset = torch.where(better, other_offset, offset)
    numbers = _numbers(values, factor, offset).to(torch.uint8)
    half = BLOCK // 2
    blocks[:, :2] = _half_bytes(factor)
    blocks[:, 2:4] = _half_bytes(offset)
    blocks[:, 4:] = (numbers[:half] | (numbers[half:] << 4)).t()


def _fitted(
    values: Tensor, centred: Tensor, mean: Tensor, low: Tensor, width: Tensor, shrink: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Squared error, factor and offset of each block, from its range moved inwards by ``shrink``.

    ``centred`` are the values less their mean.
    """
    factor = _as_half(width * ((1.0 - 2.0 * shrink) / 15.0))
    offset = _as_half(low + width * shrink)
    for _ in range(_FITS):
        numbers = _numbers(values, factor, offset)
        middle = numbers.mean(dim=0)
        numbers -= middle
        covariance = (numbers * centred).sum(dim=0)
        factor = _as_half(covariance * _inverse(numbers.square_().sum(dim=0)))
        offset = _as_half(mean - factor * middle)
    decoded = _numbers(values, factor, offset).mul_(factor).add_(offset)
    return decoded.sub_(values).square_().sum(dim=0), factor, offset


def _numbers(values: Tensor, factor: Tensor, offset: Tensor) -> Tensor:
    """The nearest of 0 to 15, as float32; 0 where the factor is."""
    return (values - offset).mul_(_inverse(factor)).round_().clamp_(0.0, 15.0)


def _inverse(factor: Tensor) -> Tensor:
    return torch.where(factor == 0.0, 0.0, 1.0 / factor)


def _as_half(values: Tensor) -> Tensor:
    """Rounded as it will be stored."""
    return values.to(torch.float16).to(torch.float32)


def _half_bytes(values: Tensor) -> Tensor:
    """float32 [m] as the bytes of float16, uint8 [m, 2]."""
    return values.to(torch.float16).view(-1, 1).view(torch.uint8)
