"""The gated multilayer perceptron."""

from collections.abc import Iterator

import torch
from torch import nn

from cardan.core.interfaces.model import BuildContext, WeightSlot
from cardan.models.layers.decoder_config import DecoderConfig
from cardan.models.layers.linear import GateUpLinear, RowLinear, dtype_name


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)), with gate and up fused. x [T, hidden_size]."""

    def __init__(self, prefix: str, config: DecoderConfig, build: BuildContext) -> None:
        super().__init__()
        hidden, intermediate, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        gate_up = GateUpLinear(prefix, hidden, intermediate, bias, build)
        self.gate_up_proj = gate_up
        self.down_proj = RowLinear(f"{prefix}down_proj", intermediate, hidden, bias, build)
        self._activate_and_multiply = build.ops.bind(
            f"{config.activation}_and_mul",
            dtype=dtype_name(build.dtype),
            hidden=gate_up.intermediate_size,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(self._activate_and_multiply(self.gate_up_proj(x)))
        return out

    def weight_slots(self) -> Iterator[WeightSlot]:
        yield from self.gate_up_proj.weight_slots()
        yield from self.down_proj.weight_slots()
