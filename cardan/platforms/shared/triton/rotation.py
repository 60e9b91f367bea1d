"""Launches of the rotation of queries and keys; arguments and results as ``rotary_embedding`` and
``qk_norm_rope`` are defined."""

import torch
from torch import Tensor

from cardan.platforms.shared.triton.dependent_launch import are_fixed, dependent
from cardan.platforms.shared.triton.kernels.rotation import rotate_kernel
from cardan.platforms.shared.triton.rows import power_of_two

# Heads that one program takes.
_HEADS = 8


def rotary_embedding(
    q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    return _rotate(q, k, None, cos_sin, positions)


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor]:
    return _rotate(q, k, (q_weight, k_weight, eps), cos_sin, positions)


def _rotate(
    q: Tensor,
    k: Tensor,
    norm: tuple[Tensor, Tensor, float] | None,
    cos_sin: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor]:
    num_tokens, num_q, dim = q.shape
    num_k, half = k.shape[1], cos_sin.shape[1] // 2
    out = torch.empty(num_tokens, num_q + num_k, dim, dtype=q.dtype, device=q.device)
    heads = min(_HEADS, power_of_two(max(num_q, num_k)))
    q_weight, k_weight, eps = norm or (q, k, 0.0)
    rest = dim - 2 * half
    if num_tokens:
        rotate_kernel[(num_tokens, -(-num_q // heads) + -(-num_k // heads))](
            q,
            k,
            out,
            q_weight,
            k_weight,
            cos_sin,
            positions,
            eps,
            q.stride(0),
            q.stride(1),
            k.stride(0),
            k.stride(1),
            cos_sin.stride(0),
            are_fixed(q),
            NUM_Q=num_q,
            NUM_K=num_k,
            DIM=dim,
            HALF=half,
            HEADS=heads,
            HALF_BLOCK=power_of_two(half),
            REST_BLOCK=power_of_two(rest) if rest else 0,
            NORMED=norm is not None,
            num_warps=2,
            **dependent(q, num_tokens),
        )
    return out[:, :num_q], out[:, num_q:]
