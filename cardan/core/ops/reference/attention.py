"""Attention in plain torch on any device: the definition that every backend is tested against."""

import torch
from torch import Tensor

from cardan.core.interfaces.attention import AttentionNeed, LayerParams
from cardan.core.interfaces.capabilities import DeviceInfo, Verdict
from cardan.core.interfaces.torch_attention import Chunk, TorchAttention, TorchPlan, refusals


class ReferenceAttention(TorchAttention):
    """Multi-head, grouped and multi-query attention with all that ``LayerParams`` offers.

    Computes in (at least) float32 whatever the cache holds.
    """

    name = "reference"
    takes_mixed_dtypes = True

    @classmethod
    def accepts(cls, need: AttentionNeed, device: DeviceInfo) -> Verdict:
        return Verdict(tuple(refusals(need)))

    def attend(
        self,
        inputs: tuple[Tensor, Tensor, Tensor],
        place: tuple[TorchPlan, int],
        layer: LayerParams,
        lse: bool,
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = inputs
        chunk = place[0].chunks[layer.window][place[1]]
        n, length, num_heads, _ = q.shape
        num_kv_heads = k.shape[1]
        wide = torch.promote_types(q.dtype, torch.float32)
        # Heads of one group share keys: fold them into the query dimension.
        grouped = q.unflatten(2, (num_kv_heads, -1)).permute(0, 2, 3, 1, 4)
        scores = grouped.flatten(2, 3).to(wide) @ k.to(wide).transpose(2, 3)
        scores = scores.view(n, num_heads, length, -1).mul_(layer.scale)
        scores = _biased(scores, chunk, layer)
        top = scores.amax(-1, keepdim=True)
        sinks = None if layer.sinks is None else layer.sinks.to(wide).view(-1, 1, 1)
        if sinks is not None:
            top = torch.maximum(top, sinks)
        weights = scores.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + (sinks - top).exp()
        out = weights.view(n, num_kv_heads, -1, weights.shape[-1]) @ v.to(wide)
        out = out.view(n, num_heads, length, -1) / total
        sums = (top + total.log()).squeeze(-1).transpose(1, 2).to(torch.float32) if lse else None
        return out.transpose(1, 2).to(q.dtype), sums


def _biased(scores: Tensor, chunk: Chunk, layer: LayerParams) -> Tensor:
    """Soft cap, then the linear bias, then what must not be seen; may work in place."""
    if layer.softcap is not None:
        scores = scores.div_(layer.softcap).tanh_().mul_(layer.softcap)
    if layer.alibi_slopes is not None:
        slopes = layer.alibi_slopes.to(scores.dtype).view(-1, 1, 1)
        scores.sub_(slopes * chunk.distance.unsqueeze(1))
    return scores if chunk.hidden is None else scores.masked_fill_(chunk.hidden, -torch.inf)
