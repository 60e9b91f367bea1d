"""Attention through torch's fused kernel, for what that kernel can do."""

import torch
from torch import Tensor
from torch.nn import functional

from cardan.core.interfaces.attention import AttentionNeed, LayerParams
from cardan.core.interfaces.capabilities import DeviceInfo, Verdict
from cardan.core.interfaces.errors import UnsupportedError
from cardan.core.interfaces.torch_attention import TorchAttention, TorchPlan, refusals


class CpuAttention(TorchAttention):
    """``scaled_dot_product_attention`` over gathered keys and values, windows as masks."""

    name = "cpu"
    # What a chunk gathers should still be in the cache when it is read again.
    max_chunk_bytes = 8 << 20

    @classmethod
    def accepts(cls, need: AttentionNeed, device: DeviceInfo) -> Verdict:
        reasons = list(refusals(need))
        for asked, what in (
            (need.softcap, "a soft cap"),
            (need.sinks, "sinks"),
            (need.alibi, "ALiBi"),
            (need.lse, "the log-sum-exp"),
        ):
            if asked:
                reasons.append(f"torch's fused attention has no place for {what}")
        return Verdict(tuple(reasons))

    def attend(
        self,
        inputs: tuple[Tensor, Tensor, Tensor],
        place: tuple[TorchPlan, int],
        layer: LayerParams,
        lse: bool,
    ) -> tuple[Tensor, Tensor | None]:
        if lse or any(x is not None for x in (layer.softcap, layer.sinks, layer.alibi_slopes)):
            raise UnsupportedError("cpu attention was given a layer that it had refused")
        q, k, v = inputs
        mask = _masks(place[0], layer.window, q.dtype)[place[1]]
        n, length, num_heads, _ = q.shape
        if length == 1:
            # Heads of one group share keys: as queries of one head they read them once.
            folded = q.view(n, k.shape[1], -1, q.shape[3])
            out = functional.scaled_dot_product_attention(
                folded, k, v, attn_mask=mask, scale=layer.scale
            )
            return out.reshape(n, 1, num_heads, -1), None
        out = functional.scaled_dot_product_attention(
            q.transpose(1, 2), k, v, attn_mask=mask, scale=layer.scale, enable_gqa=True
        )
        return out.transpose(1, 2), None


def _masks(plan: TorchPlan, window: int | None, dtype: torch.dtype) -> list[Tensor | None]:
    """Additive masks of a window's chunks, made once a step (torch would make them a layer)."""
    if window not in plan.masks:
        plan.masks[window] = [
            None
            if chunk.hidden is None
            else torch.zeros(chunk.hidden.shape, dtype=dtype).masked_fill_(chunk.hidden, -torch.inf)
            for chunk in plan.chunks[window]
        ]
    return plan.masks[window]
