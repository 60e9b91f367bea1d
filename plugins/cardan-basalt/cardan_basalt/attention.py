"""Attention of a Basalt, over keys and values that the contract's own part gathers."""

from typing import ClassVar

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from cardan.core.interfaces.attention import AttentionNeed, LayerParams
from cardan.core.interfaces.capabilities import DeviceInfo, Verdict
from cardan.core.interfaces.torch_attention import TorchAttention, TorchPlan, refusals
from cardan_basalt.torch_backend import BasaltTensor, held_by

_LACKING = ("softcap", "sinks", "alibi", "lse")


class BasaltAttention(TorchAttention):
    """The product in one call; what the chip lacks is left to the reference."""

    name: ClassVar[str] = "basalt"

    @classmethod
    def accepts(cls, need: AttentionNeed, device: DeviceInfo) -> Verdict:
        lacking = [f"a Basalt has no {what}" for what in _LACKING if getattr(need, what)]
        return Verdict((*refusals(need), *lacking))

    def attend(
        self,
        inputs: tuple[Tensor, Tensor, Tensor],
        place: tuple[TorchPlan, int],
        layer: LayerParams,
        lse: bool,
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = map(held_by, inputs)
        plan, index = place
        hidden = plan.chunks[layer.window][index].hidden
        mask = None if hidden is None else ~held_by(hidden)
        out = scaled_dot_product_attention(
            q.transpose(1, 2), k, v, attn_mask=mask, scale=layer.scale, enable_gqa=True
        )
        return BasaltTensor(out.transpose(1, 2)), None
