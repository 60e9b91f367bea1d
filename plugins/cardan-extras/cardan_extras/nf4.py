"""A quantisation scheme: 4-bit NormalFloat (Dettmers et al. 2023, "QLoRA", section 3).

Weights of a normal distribution fall evenly on the 16 levels. Each 64 weights of a row share the
largest magnitude among them as a factor: 4.5 bits a weight.
"""

from collections.abc import Mapping
from functools import cache
from statistics import NormalDist
from typing import Any, ClassVar

import torch
from torch import Tensor

from cardan.core.interfaces.capabilities import Verdict
from cardan.core.interfaces.kernels import OpTable
from cardan.core.interfaces.quantization import LinearMethod, QuantScheme

BLOCK = 64
_HEAD = "lm_head"
# The paper's quantile of the outermost level: as far from 1 as the middle between the quantiles
# 1 - 1/32 and 1 - 1/30.
_OUTERMOST = 0.5 * ((1 - 1 / 32) + (1 - 1 / 30))


@cache
def levels() -> tuple[float, ...]:
    """The 16 levels, ascending: 7 quantiles below 0, from -1, 0 itself, and 8 above it, up to 1."""
    normal = NormalDist()

    def tail(count: int) -> list[float]:
        step = (_OUTERMOST - 0.5) / count
        return [normal.inv_cdf(_OUTERMOST - step * index) for index in range(count)]

    below, above = tail(7), tail(8)
    found = [*(-value for value in below), 0.0, *reversed(above)]
    return tuple(value / above[0] for value in found)


class NF4Scheme(QuantScheme):
    """Quantises linear layers while they load; the head and the embeddings keep their precision."""

    name: ClassVar[str] = "nf4"
    contract: ClassVar[tuple[int, int]] = (1, 0)

    def __init__(self) -> None:
        self._num_layers = 0
        self._refused: list[str] = []

    @classmethod
    def detect(cls, config: Mapping[str, Any]) -> bool:
        """False: this is for checkpoints that are not quantised."""
        return False

    def accepts(self, layer: str, in_features: int, out_features: int) -> Verdict:
        if layer == _HEAD:
            return Verdict.no("the head is kept in full precision")
        if in_features % BLOCK:
            self._refused.append(layer)
            return Verdict.no(f"in_features {in_features} is not a multiple of {BLOCK}")
        return Verdict.yes()

    def linear(
        self,
        ops: OpTable,
        layer: str,
        in_features: int,
        out_features: int,
        dtype: str,
        device: torch.device,
    ) -> LinearMethod:
        self._num_layers += 1
        return NF4Linear(in_features, out_features, device)

    def summary(self) -> str:
        text = f"layers quantised: {self._num_layers} in nf4"
        if self._refused:
            text += f"; {len(self._refused)} are no multiple of {BLOCK} wide and stay as they are"
        return text


class NF4Linear(LinearMethod):
    """Two codes a byte, the even column's in the low bits; unpacked in every call."""

    def __init__(self, in_features: int, out_features: int, device: torch.device) -> None:
        self._codes = torch.zeros(out_features, in_features // 2, dtype=torch.uint8, device=device)
        self._scales = torch.zeros(out_features, in_features // BLOCK, device=device)
        self._levels = torch.tensor(levels(), device=device)

    def load(self, row: int, weight: Tensor) -> None:
        codes, scales = quantize(weight)
        end = row + weight.shape[0]
        self._codes[row:end].copy_(codes[:, ::2] | codes[:, 1::2] << 4)
        self._scales[row:end].copy_(scales)

    def finish(self) -> None:
        """Everything was packed as it came."""

    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        codes = torch.stack((self._codes & 15, self._codes >> 4), dim=-1).flatten(-2)
        blocks = self._levels[codes.to(torch.int64)].unflatten(-1, (-1, BLOCK))
        weight = (blocks * self._scales.unsqueeze(-1)).flatten(-2)
        return torch.nn.functional.linear(x, weight.to(x.dtype), bias)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weights [O, I] as the numbers of levels, uint8 [O, I], and factors, float32 [O, I / 64]."""
    blocks = weight.to(torch.float32).unflatten(-1, (-1, BLOCK))
    scales = blocks.abs().amax(-1)
    parts = blocks / torch.where(scales > 0, scales, 1.0).unsqueeze(-1)
    table = torch.tensor(levels(), device=weight.device)
    codes = torch.bucketize(parts, (table[1:] + table[:-1]) / 2)
    return codes.flatten(-2).to(torch.uint8), scales
