"""Random inputs for the operations on quantised weights."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from cardan.core.interfaces.kernels import Attributes, Case
from cardan.core.ops.reference.block_decoders import decode_rows
from cardan.core.types.ggml import BLOCK_TYPES, block_format

# Where blocks of a format hold their float16 factor; where they hold a second one, and how large
# it must be relative to the first for values of mean 0.
_FACTORS: Final[dict[str, tuple[tuple[int, float], ...]]] = {
    "q4_0": ((0, 1.0),),
    "q4_1": ((0, 1.0), (2, -7.5)),
    "q5_0": ((0, 1.0),),
    "q5_1": ((0, 1.0), (2, -15.5)),
    "q8_0": ((0, 1.0),),
    "q2_k": ((80, 1.0), (82, 1.5)),
    "q3_k": ((108, 1.0),),
    "q4_k": ((0, 1.0), (2, 7.5)),
    "q5_k": ((0, 1.0), (2, 15.5)),
    "q6_k": ((208, 1.0),),
    "iq4_nl": ((0, 1.0),),
}
# Leading dimensions of x, in_features, out_features, with a bias; by the elements in a block.
_Product = tuple[tuple[int, ...], int, int, bool]
_PRODUCTS: Final[dict[int, tuple[_Product, ...]]] = {
    32: (((1,), 64, 33, False), ((7,), 576, 17, True)),
    256: (((1,), 256, 33, False), ((7,), 768, 17, True)),
}
# Of one format only: no rows, several dimensions, many rows, a single block.
_SHAPES: Final[tuple[_Product, ...]] = (
    ((0,), 64, 8, False),
    ((2, 1), 32, 5, True),
    ((33,), 64, 24, False),
)
_TABLE_ROWS: Final = 19


def random_blocks(
    format: str, num_rows: int, in_features: int, scale: float, generator: torch.Generator
) -> Tensor:
    """Stored rows, uint8 [num_rows, row bytes], of random bits; decoded, their mean square is
    ``scale`` squared and their mean near 0."""
    block = block_format(format)
    count = num_rows * (in_features // block.elements)
    raw = torch.randint(0, 256, (count, block.nbytes), generator=generator, dtype=torch.uint8)
    factor = (torch.rand(count, generator=generator) * 0.5 + 0.75).numpy()
    blocks = _with_factor(raw.numpy(), format, factor)
    decoded = decode_rows(blocks, BLOCK_TYPES[format])
    blocks = _with_factor(blocks, format, factor * (scale / np.sqrt(np.square(decoded).mean())))
    return torch.from_numpy(blocks).view(num_rows, -1)


def make_block_linear(dtype: Any, device: Any, seed: int) -> Sequence[Case]:
    """Every format with one row and with several, without and with bias; outputs of order 1."""
    generator = torch.Generator().manual_seed(seed)
    cases = []
    for format in BLOCK_TYPES:
        for product in _products(format):
            _, inputs, outputs, _ = product
            weight = random_blocks(format, outputs, inputs, inputs**-0.5, generator)
            x, bias = _activations(product, dtype, device, generator)
            attributes: Attributes = {
                "dtype": _name(dtype),
                "format": format,
                "in_features": inputs,
                "out_features": outputs,
            }
            cases.append(Case((x, weight.to(device), bias, format), attributes))
    return cases


def make_block_embedding(dtype: Any, device: Any, seed: int) -> Sequence[Case]:
    """Every format; ids repeat and are out of order, and once there are none."""
    generator = torch.Generator().manual_seed(seed)
    cases = []
    for format in BLOCK_TYPES:
        hidden = 3 * block_format(format).elements
        weight = random_blocks(format, _TABLE_ROWS, hidden, 1.0, generator).to(device)
        num_ids = 0 if format == "q5_0" else 5
        token_ids = torch.randint(0, _TABLE_ROWS, (num_ids,), generator=generator).to(device)
        attributes: Attributes = {"dtype": _name(dtype), "format": format, "hidden": hidden}
        cases.append(Case((token_ids, weight, format, dtype), attributes))
    return cases


def make_int8_linear(dtype: Any, device: Any, seed: int) -> Sequence[Case]:
    """One row, many, none and several dimensions; a row of zeros; odd sizes."""
    generator = torch.Generator().manual_seed(seed)
    products: tuple[_Product, ...] = (
        ((1,), 64, 33, False),
        ((7,), 576, 17, True),
        ((3,), 50, 30, True),
        *_SHAPES,
    )
    cases = []
    for product in products:
        _, inputs, outputs, _ = product
        weight = torch.randint(-127, 128, (outputs, inputs), generator=generator).to(torch.int8)
        # The mean square of the numbers is that of a uniform distribution.
        unit = 3.0**0.5 / 127.0 * inputs**-0.5
        scales = (torch.rand(outputs, generator=generator) * 0.5 + 0.75) * unit
        x, bias = _activations(product, dtype, device, generator)
        if x.ndim == 2 and x.shape[0] > 1:
            x[0] = 0.0
        attributes: Attributes = {
            "dtype": _name(dtype),
            "in_features": inputs,
            "out_features": outputs,
        }
        cases.append(Case((x, weight.to(device), scales.to(device), bias), attributes))
    return cases


def _products(format: str) -> Iterator[_Product]:
    yield from _PRODUCTS[block_format(format).elements]
    if format == "q4_0":
        yield from _SHAPES


def _activations(
    product: _Product, dtype: torch.dtype, device: Any, generator: torch.Generator
) -> tuple[Tensor, Tensor | None]:
    """x and the bias."""
    shape, inputs, outputs, biased = product
    x = torch.randn((*shape, inputs), generator=generator).to(device=device, dtype=dtype)
    bias = torch.randn(outputs, generator=generator).to(device=device, dtype=dtype)
    return x, bias if biased else None


def _with_factor(
    blocks: np.ndarray[Any, np.dtype[np.uint8]],
    format: str,
    factor: np.ndarray[Any, np.dtype[np.float32]],
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A copy of ``blocks`` whose float16 factors are ``factor`` for each block."""
    changed = blocks.copy()
    for position, ratio in _FACTORS[format]:
        halves = (factor * ratio).astype("<f2").view(np.uint8).reshape(-1, 2)
        changed[:, position : position + 2] = halves
    return changed


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
