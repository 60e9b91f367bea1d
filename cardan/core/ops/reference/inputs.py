"""Random inputs for the operations of a decoder: a size that suits vectors, and an odd one.

All are drawn on the host, so that a seed gives the same numbers on every device. The first case
of each operation is its plain use.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cardan.core.interfaces.kernels import Attributes, Case

# A draw: shape and scale to a tensor of the working dtype on the device.
_Draw = Callable[..., Tensor]

_EPS = 1e-6
_ROWS_HIDDEN = ((5, 64), (3, 50))
# tokens, query heads, key heads, head dim, rotary dim
_HEADS = ((6, 4, 2, 64, 64), (5, 3, 1, 40, 24))


def make_embedding(dtype: Any, device: Any, seed: int) -> Sequence[Case]:
    draw, generator = _drawer(dtype, device, seed)
    cases = []
    for rows, hidden in _ROWS_HIDDEN:
        token_ids = torch.randint(0, 17, (rows,), generator=generator).to(device)
        cases.append(Case((token_ids, draw(17, hidden)), _attributes(dtype, hidden=hidden)))
    return cases


def make_linear(dtype: Any, device: Any, seed: int) -> Sequence[Case]:
    """Without bias, with bias, and a batch of two dimensions; outputs are of order 1."""
    draw, _ = _drawer(dtype, device, seed)
    cases = []
    for shape, inputs, outputs, biased in (
        ((4,), 64, 96, False),
        ((3,), 50, 30, True),
        ((2, 3), 64, 32, True),
    ):
        weight = draw(outputs, inputs, scale=inputs**-0.5)
        args = (draw(*shape, inputs), weight, draw(outputs) if biased else None)
        attributes = _attributes(dtype, in_features=inputs, out_features=outputs)
        cases.append(Case(args, attributes))
    return cases


def make_linear_float32(dtype: Any, device: Any, seed: int) -> Sequence[Case]:
    """Those of ``linear``, without their biases."""
    return [replace(case, args=case.args[:2]) for case in make_linear(dtype, device, seed)]


def make_rms_norm(dtype: Any, device: Any, seed: int) -> Sequence[Case]:
    """Weights in the working dtype and in float32; three dimensions; a row of zeros."""
    draw, _ = _drawer(dtype, device, seed)
    cases = []
    for rows, hidden in _ROWS_HIDDEN:
        x = draw(rows, 2, hidden, scale=3.0)
        x[0, 0] = 0.0
        cases.append(Case((x, draw(hidden), _EPS), _attributes(dtype, hidden=hidden)))
    x, weight = draw(4, 64), draw(64).to(torch.float32)
    cases.append(Case((x, weight, _EPS), _attributes(dtype, hidden=64)))
    return cases


def make_fused_add_rms_norm(dtype: Any, device: Any, seed: int) -> Sequence[Case]:
    draw, _ = _drawer(dtype, device, seed)
    return [
        Case(
            (draw(rows, hidden), draw(rows, hidden, scale=3.0), draw(hidden), _EPS),
            _attributes(dtype, hidden=hidden),
        )
        for rows, hidden in _ROWS_HIDDEN
    ]


def make_rotary_embedding(dtype: Any, device: Any, seed: int) -> Sequence[Case]:
    """All of a head rotated, and a part of it; positions repeat and are out of order."""
    draw, generator = _drawer(dtype, device, seed)
    return [
        Case(
            (
                draw(tokens, heads, dim),
                draw(tokens, kv_heads, dim),
                *_rotation(tokens, rotary, generator, device),
            ),
            _attributes(dtype, head_dim=dim),
        )
        for tokens, heads, kv_heads, dim, rotary in _HEADS
    ]


def make_qk_norm_rope(dtype: Any, device: Any, seed: int) -> Sequence[Case]:
    draw, generator = _drawer(dtype, device, seed)
    cases = []
    for tokens, heads, kv_heads, dim, rotary in _HEADS:
        q, k = draw(tokens, heads, dim), draw(tokens, kv_heads, dim)
        rotation = _rotation(tokens, rotary, generator, device)
        args = (q, k, draw(dim), draw(dim), _EPS, *rotation)
        cases.append(Case(args, _attributes(dtype, head_dim=dim, hidden=dim)))
    return cases


def make_gated(dtype: Any, device: Any, seed: int) -> Sequence[Case]:
    """Inputs of the gated activations, far into both tails."""
    draw, _ = _drawer(dtype, device, seed)
    cases = []
    for rows, hidden in _ROWS_HIDDEN:
        x = draw(rows, 2 * hidden, scale=2.0)
        x[0, : hidden // 2] *= 10.0
        cases.append(Case((x,), _attributes(dtype, hidden=hidden)))
    return cases


def make_soft_cap(dtype: Any, device: Any, seed: int) -> Sequence[Case]:
    draw, _ = _drawer(dtype, device, seed)
    return [
        Case((draw(rows, hidden, scale=20.0), 30.0), _attributes(dtype, hidden=hidden))
        for rows, hidden in _ROWS_HIDDEN
    ]


def make_to_float32(dtype: Any, device: Any, seed: int) -> Sequence[Case]:
    draw, _ = _drawer(dtype, device, seed)
    return [
        Case((draw(rows, hidden),), _attributes(dtype, hidden=hidden))
        for rows, hidden in _ROWS_HIDDEN
    ]


def make_finite_rows(dtype: Any, device: Any, seed: int) -> Sequence[Case]:
    """Rows with an infinity or NaN at a place of their own, and large ones without."""
    draw, generator = _drawer(dtype, device, seed)
    cases = []
    for rows, hidden in _ROWS_HIDDEN:
        x = draw(2 * rows, hidden)
        x[0] = torch.finfo(dtype).max
        for row, value in enumerate((torch.inf, -torch.inf, torch.nan)[:rows]):
            place = int(torch.randint(hidden, (1,), generator=generator))
            x[2 * row + 1, place] = value
        cases.append(Case((x,), _attributes(dtype, hidden=hidden)))
    return cases


def _attributes(dtype: torch.dtype, **sizes: int) -> Attributes:
    return {"dtype": str(dtype).removeprefix("torch."), **sizes}


def _drawer(dtype: torch.dtype, device: Any, seed: int) -> tuple[_Draw, torch.Generator]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(device=device, dtype=dtype)

    return draw, generator


def _rotation(
    tokens: int, rotary: int, generator: torch.Generator, device: Any
) -> tuple[Tensor, Tensor]:
    angles = torch.rand(32, rotary // 2, generator=generator) * 6.3
    positions = torch.randint(0, 32, (tokens,), generator=generator)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(device), positions.to(device)
