"""Weights in full precision that are quantised while they load."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch

from cardan.core.interfaces.capabilities import Verdict
from cardan.core.interfaces.kernels import REFERENCE, OpTable
from cardan.core.interfaces.quantization import (
    EmbeddingMethod,
    LinearMethod,
    QuantScheme,
    StoredBlocks,
)
from cardan.plugins.quantization.block_linear import BlockLinear
from cardan.plugins.quantization.int8_linear import Int8Linear
from cardan.plugins.quantization.layer import Layer
from cardan.plugins.quantization.quantizers import (
    BLOCK,
    quantize_int8,
    quantize_q4_1,
    quantize_q8_0,
)
from cardan.plugins.quantization.rounded_linear import RoundedLinear
from cardan.plugins.quantization.stored_embedding import StoredEmbedding

_LOG = logging.getLogger("cardan.engine")

_HEAD = "lm_head"
_Quantize = Callable[[torch.Tensor], torch.Tensor]
_QUANTIZERS: Mapping[str, _Quantize] = {"q8_0": quantize_q8_0, "q4_1": quantize_q4_1}


class OnlineScheme(QuantScheme):
    """Quantises all linear layers whose width fits. Embeddings stay as they are in the checkpoint:
    in full precision, or in the blocks of a GGUF file."""

    contract: ClassVar[tuple[int, int]] = (1, 0)
    # in_features of a layer must be a multiple of it.
    multiple: ClassVar[int] = BLOCK

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._refused: dict[str, int] = {}
        self._unserved: set[str] = set()

    @classmethod
    def detect(cls, config: Mapping[str, Any]) -> bool:
        """False: these are for checkpoints that are not quantised."""
        return False

    def accepts(self, layer: str, in_features: int, out_features: int) -> Verdict:
        if in_features % self.multiple:
            self._refused[layer] = in_features
            return Verdict.no(f"in_features {in_features} is not a multiple of {self.multiple}")
        return Verdict.yes()

    def embedding(
        self, ops: OpTable, num_rows: int, hidden: int, dtype: str, device: torch.device
    ) -> EmbeddingMethod:
        return StoredEmbedding(ops, hidden, dtype, device)

    def count(self, form: str, is_served: bool) -> None:
        """Note that a layer is kept in ``form``, or (not served) rounded to it."""
        self._counts[form] += 1
        if not is_served and form not in self._unserved:
            self._unserved.add(form)
            _LOG.warning(
                "quantization %s: no kernel here computes on weights in %s; they are rounded to it "
                "and kept in full precision, which is neither faster nor smaller",
                self.name,
                form,
            )

    def summary(self) -> str:
        done = ", ".join(f"{count} in {form}" for form, count in self._counts.items()) or "none"
        text = f"layers quantised: {done}"
        if self._refused:
            text += (
                f"; {len(self._refused)} stay in full precision, because their in_features "
                f"({', '.join(map(str, sorted(set(self._refused.values()))))}) are not a multiple "
                f"of {self.multiple}"
            )
        return text


class BlockScheme(OnlineScheme):
    """Blocks of 32 with factors of their own, as in GGUF files; the head in blocks of 8 bits."""

    format: ClassVar[str]

    def linear(
        self,
        ops: OpTable,
        layer: str,
        in_features: int,
        out_features: int,
        dtype: str,
        device: torch.device,
    ) -> LinearMethod:
        format = "q8_0" if layer == _HEAD else self.format
        made = Layer(ops, in_features, out_features, dtype, device)
        is_served = made.has_kernel(format, out_features)
        self.count(format, is_served)
        if is_served:
            return _QuantizedLinear(made, format)
        return RoundedLinear(made, partial(_rounded_to_blocks, made, format))


class Q8Scheme(BlockScheme):
    """8.5 bits a weight: ``q8_0``."""

    name: ClassVar[str] = "q8"
    format: ClassVar[str] = "q8_0"


class Q4Scheme(BlockScheme):
    """5 bits a weight: ``q4_1`` with a search, which of the 4-bit formats has the least error."""

    name: ClassVar[str] = "q4"
    format: ClassVar[str] = "q4_1"


class Int8Scheme(OnlineScheme):
    """8 bits a weight and a scale for each output; activations become 8 bits in every step."""

    name: ClassVar[str] = "int8"
    multiple: ClassVar[int] = 1

    def linear(
        self,
        ops: OpTable,
        layer: str,
        in_features: int,
        out_features: int,
        dtype: str,
        device: torch.device,
    ) -> LinearMethod:
        made = Layer(ops, in_features, out_features, dtype, device)
        sizes = {"in_features": in_features, "out_features": out_features}
        is_served = ops.resolve("int8_linear", dtype=dtype, **sizes).provider != REFERENCE
        self.count("int8", is_served)
        return Int8Linear(made) if is_served else RoundedLinear(made, _rounded_to_int8)


class _QuantizedLinear(BlockLinear):
    """Quantises what it is given to ``format``."""

    def __init__(self, layer: Layer, format: str) -> None:
        super().__init__(layer)
        self._format = format
        self._quantize = _QUANTIZERS[format]

    def load(self, row: int, weight: torch.Tensor) -> None:
        data = self._quantize(weight)
        self.add(row, StoredBlocks(self._format, weight.shape[1], data))

    def load_stored(self, row: int, blocks: StoredBlocks) -> bool:
        if blocks.format != self._format:
            return False
        self.add(row, blocks)
        return True


def _rounded_to_blocks(layer: Layer, format: str, weight: torch.Tensor) -> torch.Tensor:
    """Rows as they are after quantising, decoded by looking all of them up."""
    data = _QUANTIZERS[format](weight).to(layer.device)
    use = {"dtype": layer.dtype, "format": format}
    look_up = layer.ops.bind("block_embedding", hidden=weight.shape[1], **use)
    rows = torch.arange(data.shape[0], device=layer.device)
    decoded: torch.Tensor = look_up(rows, data, format, layer.torch_dtype)
    return decoded


def _rounded_to_int8(weight: torch.Tensor) -> torch.Tensor:
    numbers, scales = quantize_int8(weight)
    return numbers.to(torch.float32) * scales[:, None]
