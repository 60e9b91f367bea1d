"""Operations that torch does faster on a CPU than their definitions do."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Fewer dispatches than the definition, which counts for few rows."""
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


def rotary_embedding(
    q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotates q and k as one tensor and accumulates into the result."""
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    half = cos.shape[-1]
    heads = torch.cat((q, k), dim=1).to(cos.dtype)
    rotated = torch.empty_like(heads)
    first, second = heads[..., :half], heads[..., half : 2 * half]
    torch.mul(first, cos, out=rotated[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=rotated[..., half : 2 * half]).addcmul_(first, sin)
    if 2 * half < heads.shape[-1]:
        rotated[..., 2 * half :] = heads[..., 2 * half :]
    rotated_q, rotated_k = rotated.split([q.shape[1], k.shape[1]], dim=1)
    return rotated_q.to(q.dtype), rotated_k.to(k.dtype)
