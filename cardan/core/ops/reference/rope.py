"""Rotary position embedding (Su et al. 2021), half-split style."""

from collections.abc import Mapping

import torch
from torch import Tensor

from cardan.core.interfaces.kernels import Kernel


def rotary_embedding(
    q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotate the first R elements of each head of q [T, HQ, D] and k [T, HK, D].

    ``cos_sin`` [P, R] float32 holds R/2 cosines, then R/2 sines, for each position; element i is
    paired with element i + R/2. ``positions`` [T] int64. Computed in (at least) float32; results
    have q's and k's dtypes. Attributes of use: ``dtype``, ``head_dim`` (D).
    """
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def qk_norm_rope(  # noqa: PLR0913 (the operation's signature)
    parts: Mapping[str, Kernel],
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor]:
    """Normalise each head of q and k with weights [D], then rotate as ``rotary_embedding``.

    Attributes of use: as ``rotary_embedding``, and ``hidden`` (D) for the norm.
    """
    rms_norm = parts["rms_norm"]
    rotate = parts["rotary_embedding"]
    rotated: tuple[Tensor, Tensor] = rotate(
        rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps), cos_sin, positions
    )
    return rotated


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    half = cos.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    first, second = first.to(wide), second.to(wide)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((rotated.to(x.dtype), rest), dim=-1) if rest.shape[-1] else rotated.to(x.dtype)
