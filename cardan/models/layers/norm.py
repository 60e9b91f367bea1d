"""Root-mean-square norms."""

from collections.abc import Iterator

import torch
from torch import nn

from cardan.core.interfaces.model import BuildContext, WeightSlot
from cardan.models.layers.decoder_config import DecoderConfig
from cardan.models.layers.linear import dtype_name, frozen


class RMSNormWeight(nn.Module):
    """The weight of a norm over ``size`` elements, replicated on every rank.

    Where ``offset`` (added to the stored weight) is not 0 the sum is kept in float32, because in a
    short dtype it would lose what makes it differ from the offset.
    """

    def __init__(self, name: str, size: int, offset: float, build: BuildContext) -> None:
        super().__init__()
        dtype = torch.float32 if offset else build.dtype
        self.weight = frozen(torch.empty(size, dtype=dtype, device=build.device))
        self._name = name
        self._offset = offset

    def weight_slots(self) -> Iterator[WeightSlot]:
        yield WeightSlot(f"{self._name}.weight", tuple(self.weight.shape), self._load)

    def _load(self, stored: torch.Tensor) -> None:
        self.weight.copy_(stored)
        if self._offset:
            self.weight.add_(self._offset)


class RMSNorm(RMSNormWeight):
    """A norm over the hidden size, alone or fused with the residual sum before it."""

    def __init__(self, name: str, config: DecoderConfig, build: BuildContext) -> None:
        super().__init__(name, config.hidden_size, config.norm_offset, build)
        self._eps = config.rms_norm_eps
        dtype = dtype_name(build.dtype)
        self._norm = build.ops.bind("rms_norm", dtype=dtype, hidden=config.hidden_size)
        self._add_norm = build.ops.bind(
            "fused_add_rms_norm", dtype=dtype, hidden=config.hidden_size
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden_size] -> the normed x."""
        out: torch.Tensor = self._norm(x, self.weight, self._eps)
        return out

    def add(
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(the normed sum of x and residual, the sum); without a residual x is the sum."""
        if residual is None:
            return self(x), x
        normed, summed = self._add_norm(x, residual, self.weight, self._eps)
        return normed, summed
