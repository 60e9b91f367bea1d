"""Decoder layers: attention and MLP between residual sums.

A layer takes what the layer before has yet to add, and the running sum (``residual``), so that
each sum fuses with the norm behind it. The first layer gets None for the sum.
"""

from collections.abc import Iterator

import torch
from torch import nn

from cardan.core.interfaces.model import BuildContext, StepContext, WeightSlot
from cardan.models.layers.attention import SelfAttention, rows_of
from cardan.models.layers.decoder_config import DecoderConfig
from cardan.models.layers.experts import ExpertMixture
from cardan.models.layers.mlp import GatedMLP
from cardan.models.layers.norm import RMSNorm


class DecoderLayer(nn.Module):
    """Norms before attention and before the MLP."""

    def __init__(
        self, index: int, config: DecoderConfig, cos_sin: torch.Tensor, build: BuildContext
    ) -> None:
        super().__init__()
        prefix = f"model.layers.{index}."
        self.self_attn = SelfAttention(index, config, cos_sin, build)
        self.mlp: GatedMLP | ExpertMixture
        if config.experts is not None and config.layers[index].has_experts:
            self.mlp = ExpertMixture(prefix, config.hidden_size, config.experts, build)
        else:
            self.mlp = GatedMLP(f"{prefix}mlp.", config, build)
        self.input_layernorm = RMSNorm(f"{prefix}input_layernorm", config, build)
        self.post_attention_layernorm = RMSNorm(f"{prefix}post_attention_layernorm", config, build)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        step: StepContext,
        ends: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, hidden_size] and the residual -> the same for the next layer; of the tokens
        ``ends`` alone, if these are given, once attention has seen all."""
        x, residual = self.input_layernorm.add(x, residual)
        x, residual = self.self_attn(x, step, ends), rows_of(residual, ends)
        x, residual = self.post_attention_layernorm.add(x, residual)
        return self.mlp(x), residual

    def weight_slots(self) -> Iterator[WeightSlot]:
        yield from self.self_attn.weight_slots()
        yield from self.mlp.weight_slots()
        yield from self.input_layernorm.weight_slots()
        yield from self.post_attention_layernorm.weight_slots()


class SandwichDecoderLayer(DecoderLayer):
    """Norms before and after attention, and before and after the MLP (Gemma 2 and 3).

    Here ``post_attention_layernorm`` norms the attention's output.
    """

    def __init__(
        self, index: int, config: DecoderConfig, cos_sin: torch.Tensor, build: BuildContext
    ) -> None:
        super().__init__(index, config, cos_sin, build)
        prefix = f"model.layers.{index}."
        self.pre_feedforward_layernorm = RMSNorm(
            f"{prefix}pre_feedforward_layernorm", config, build
        )
        self.post_feedforward_layernorm = RMSNorm(
            f"{prefix}post_feedforward_layernorm", config, build
        )

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        step: StepContext,
        ends: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.input_layernorm.add(x, residual)
        x, residual = self.self_attn(x, step, ends), rows_of(residual, ends)
        x = self.post_attention_layernorm(x)
        x, residual = self.pre_feedforward_layernorm.add(x, residual)
        return self.post_feedforward_layernorm(self.mlp(x)), residual

    def weight_slots(self) -> Iterator[WeightSlot]:
        yield from super().weight_slots()
        yield from self.pre_feedforward_layernorm.weight_slots()
        yield from self.post_feedforward_layernorm.weight_slots()
