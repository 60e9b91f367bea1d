"""A quantisation scheme with checkpoints of its own: "pack-quantized" of compressed-tensors.

Each matrix ``x.weight`` [O, I] is three tensors: ``x.weight_packed`` int32 [O, I / 8] of 4-bit
numbers plus 8, the first column's in the lowest bits; ``x.weight_scale`` [O, I / group], by which
they are multiplied; ``x.weight_shape`` [2]. The format's definition is vllm-project's package
compressed-tensors, ``compressors/pack_quantized``.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from cardan.core.interfaces.capabilities import Verdict
from cardan.core.interfaces.errors import ConfigError, WeightsError
from cardan.core.interfaces.kernels import OpTable
from cardan.core.interfaces.quantization import (
    LinearMethod,
    QuantScheme,
    SchemeBlocks,
    StoredBlocks,
)

_BITS, _PER_WORD = 4, 8
_KEY = "quantization_config"
_HEAD = "lm_head"
# The projections in the checkpoint of which the models' fused ones are made.
_FUSED: Mapping[str, Sequence[str]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


@dataclass(frozen=True, slots=True)
class PackedMatrix(SchemeBlocks):
    """``data`` int32 [rows, in_features / 8] and ``scales`` [rows, in_features / group]."""

    scales: Tensor

    @property
    def group(self) -> int:
        return self.in_features // int(self.scales.shape[1])

    def rows(self, start: int, stop: int) -> "PackedMatrix":
        return replace(self, data=self.data[start:stop], scales=self.scales[start:stop])

    def columns(self, start: int, stop: int) -> "PackedMatrix | None":
        if start % self.group or stop % self.group:
            return None
        return replace(
            self,
            in_features=stop - start,
            data=self.data[:, start // _PER_WORD : stop // _PER_WORD],
            scales=self.scales[:, start // self.group : stop // self.group],
        )

    def decoded(self) -> Tensor:
        return unpacked(self.data, self.scales)


class PackQuantizedScheme(QuantScheme):
    """Layers stay packed; what the checkpoint's ``ignore`` names is in full precision."""

    name: ClassVar[str] = "pack-quantized"
    contract: ClassVar[tuple[int, int]] = (1, 0)

    def __init__(self, group: int, ignored: Sequence[str], is_tied: bool) -> None:
        """``group``: columns with a scale in common. ``ignored``: names, or regular expressions
        behind ``re:``."""
        self._group = group
        self._ignored = tuple(ignored)
        self._is_tied = is_tied
        self._num_layers = 0

    @classmethod
    def detect(cls, config: Mapping[str, Any]) -> bool:
        stated = config.get(_KEY)
        return isinstance(stated, Mapping) and (
            stated.get("quant_method") == "compressed-tensors" and stated.get("format") == cls.name
        )

    @classmethod
    def for_checkpoint(cls, config: Mapping[str, Any]) -> "PackQuantizedScheme":
        if not cls.detect(config):
            raise ConfigError(
                f"model.quantization {cls.name}: config.json does not say that the checkpoint is "
                "stored so; choose another scheme, or none"
            )
        stated = config[_KEY]
        groups = list(stated.get("config_groups", {}).values())
        weights = groups[0].get("weights") or {} if len(groups) == 1 else {}
        wanted = {"num_bits": _BITS, "type": "int", "symmetric": True, "strategy": "group"}
        found = {name: weights.get(name) for name in wanted}
        group = weights.get("group_size")
        rounds = any(item.get("input_activations") for item in groups)
        if (
            found != wanted
            or rounds
            or not isinstance(group, int)
            or group < 1
            or group % _PER_WORD
        ):
            raise ConfigError(
                f"{_KEY} of config.json: one config group with weights {wanted} and a group_size "
                f"that is a multiple of {_PER_WORD}, and no input_activations, is read, not "
                f"{stated.get('config_groups')}"
            )
        return cls(group, stated.get("ignore") or (), bool(config.get("tie_word_embeddings")))

    def accepts(self, layer: str, in_features: int, out_features: int) -> Verdict:
        if layer == _HEAD and self._is_tied:
            return Verdict.no("the head is the table of embeddings")
        if any(self._is_ignored(name) for name in _pieces(layer)):
            return Verdict.no("the checkpoint's configuration ignores it")
        if in_features % self._group:
            return Verdict.no(f"in_features {in_features} is no multiple of {self._group}")
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
        return _PackedLinear(layer, (out_features, in_features), self._group, device)

    def tensors_of(self, name: str, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        layer, _, kind = name.rpartition(".")
        if kind != "weight" or len(shape) != 2 or self._is_ignored(layer):
            return {}
        rows, columns = shape
        return {
            f"{name}_packed": (rows, columns // _PER_WORD),
            f"{name}_scale": (rows, columns // self._group),
            f"{name}_shape": (2,),
        }

    def assemble(
        self, name: str, shape: tuple[int, ...], tensors: Mapping[str, Tensor]
    ) -> PackedMatrix:
        packed, stated = tensors[f"{name}_packed"], tensors[f"{name}_shape"].tolist()
        if stated != list(shape) or packed.dtype != torch.int32:
            raise WeightsError(
                f"{name} is {stated} in {packed.dtype}, the model needs {list(shape)} in int32"
            )
        return PackedMatrix(self.name, shape[1], packed, tensors[f"{name}_scale"])

    def summary(self) -> str:
        return f"layers as stored: {self._num_layers} in {_BITS} bits"

    def _is_ignored(self, layer: str) -> bool:
        return any(
            re.match(entry[3:], layer) if entry.startswith("re:") else entry == layer
            for entry in self._ignored
        )


class _PackedLinear(LinearMethod):
    """Words and scales as they come; unpacked in every call."""

    def __init__(
        self, layer: str, shape: tuple[int, int], group: int, device: torch.device
    ) -> None:
        rows, columns = shape
        self._layer = layer
        self._words = torch.zeros(rows, columns // _PER_WORD, dtype=torch.int32, device=device)
        self._scales = torch.zeros(rows, columns // group, device=device)

    def load(self, row: int, weight: Tensor) -> None:
        """Refused: the checkpoint says that this layer is packed.

        Raises:
            WeightsError: always.
        """
        raise WeightsError(
            f"{self._layer} is stored in full precision, and {_KEY} of config.json does not ignore "
            "it; add its name to that list"
        )

    def load_stored(self, row: int, blocks: StoredBlocks) -> bool:
        if not isinstance(blocks, PackedMatrix):
            return False
        self._words[row : row + blocks.num_rows].copy_(blocks.data)
        self._scales[row : row + blocks.num_rows].copy_(blocks.scales)
        return True

    def finish(self) -> None:
        """Everything is as it came."""

    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        weight = unpacked(self._words, self._scales)
        return torch.nn.functional.linear(x, weight.to(x.dtype), bias)


def unpacked(words: Tensor, scales: Tensor) -> Tensor:
    """Words int32 [O, I / 8] and scales [O, I / group] as numbers, float32 [O, I]."""
    shifts = torch.arange(0, _BITS * _PER_WORD, _BITS, dtype=torch.int32, device=words.device)
    numbers = ((words[:, :, None] >> shifts & 15) - 8).to(torch.float32).flatten(1)
    groups = numbers.unflatten(1, (scales.shape[1], -1)) * scales.to(torch.float32)[:, :, None]
    return groups.flatten(1)


def _pieces(layer: str) -> Sequence[str]:
    prefix, dot, last = layer.rpartition(".")
    return [f"{prefix}{dot}{piece}" for piece in _FUSED.get(last, (last,))]
