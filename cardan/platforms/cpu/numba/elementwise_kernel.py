"""Norms, rotation and the gated activation compiled by numba, for the few rows of a decode step."""

import math
from typing import Any

import numpy as np

from cardan.platforms.cpu.numba.arithmetic import exponential
from cardan.platforms.cpu.numba.compiler import array_at, kernel, part_of_kernel


@part_of_kernel
def _norm_row(out: Any, x: Any, weight: Any, eps: float) -> None:
    squares = np.float32(0)
    for i in range(len(x)):
        squares += x[i] * x[i]
    factor = np.float32(1 / math.sqrt(squares / len(x) + eps))
    for i in range(len(x)):
        out[i] = x[i] * factor * weight[i]


@kernel(f"void({', '.join(['int64'] * 7)}, float64)")
def norm(  # noqa: PLR0913 (addresses and sizes of a call)
    out: int,
    total: int,
    x: int,
    residual: int,
    weight: int,
    rows: int,
    hidden: int,
    eps: float,
) -> None:
    """float32 rows normalised; with a ``residual`` (0: none) its sum with x, which goes to
    ``total``."""
    weights = array_at(weight, hidden, np.float32)
    for row in range(rows):
        at = 4 * row * hidden
        given = array_at(x + at, hidden, np.float32)
        if residual:
            more = array_at(residual + at, hidden, np.float32)
            summed = array_at(total + at, hidden, np.float32)
            for i in range(hidden):
                summed[i] = given[i] + more[i]
            given = summed
        _norm_row(array_at(out + at, hidden, np.float32), given, weights, eps)


@part_of_kernel
def _rotate_head(out: Any, x: Any, cosines: Any, sines: Any) -> None:
    half = len(cosines)
    for i in range(half):
        first, second = x[i], x[half + i]
        out[i] = first * cosines[i] - second * sines[i]
        out[half + i] = second * cosines[i] + first * sines[i]
    for i in range(2 * half, len(x)):
        out[i] = x[i]


@part_of_kernel
def _rotate_token(place: Any, token: int, dim: int, cosines: Any, sines: Any) -> None:
    """``place``: addresses of the result and of x, its strides in elements, its heads."""
    out, x, token_stride, head_stride, heads = place
    for head in range(heads):
        given = x + 4 * (token * token_stride + head * head_stride)
        _rotate_head(
            array_at(out + 4 * (token * heads + head) * dim, dim, np.float32),
            array_at(given, dim, np.float32),
            cosines,
            sines,
        )


@kernel(f"int64({', '.join(['int64'] * 16)})")
def rotate(  # noqa: PLR0913 (addresses and sizes of a call)
    q_out: int,
    q: int,
    q_token_stride: int,
    q_head_stride: int,
    q_heads: int,
    k_out: int,
    k: int,
    k_token_stride: int,
    k_head_stride: int,
    k_heads: int,
    dim: int,
    cos_sin: int,
    num_positions: int,
    half: int,
    positions: int,
    tokens: int,
) -> int:
    """Rotate the heads of float32 q and k [tokens, heads, dim] to dense results. Returns 1 if a
    position is not in the table, of which the tokens before are rotated."""
    places = array_at(positions, tokens, np.int64)
    for token in range(tokens):
        place = places[token]
        if place < 0 or place >= num_positions:
            return 1
        angles = array_at(cos_sin + 8 * place * half, 2 * half, np.float32)
        cosines, sines = angles[:half], angles[half:]
        queries = (q_out, q, q_token_stride, q_head_stride, q_heads)
        _rotate_token(queries, token, dim, cosines, sines)
        keys = (k_out, k, k_token_stride, k_head_stride, k_heads)
        _rotate_token(keys, token, dim, cosines, sines)
    return 0


@kernel(f"void({', '.join(['int64'] * 4)})")
def gate(out: int, x: int, rows: int, hidden: int) -> None:
    """SiLU of the first halves of float32 rows [2 * hidden] times the second ones."""
    for row in range(rows):
        gates = array_at(x + 8 * row * hidden, hidden, np.float32)
        ups = array_at(x + (8 * row + 4) * hidden, hidden, np.float32)
        target = array_at(out + 4 * row * hidden, hidden, np.float32)
        for i in range(hidden):
            target[i] = gates[i] / (np.float32(1) + exponential(-gates[i])) * ups[i]
