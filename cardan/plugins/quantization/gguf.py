"""Weights in the blocks in which a GGUF file stores them."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from cardan.core.interfaces.capabilities import Verdict
from cardan.core.interfaces.kernels import OpTable
from cardan.core.interfaces.quantization import (
    EmbeddingMethod,
    LinearMethod,
    QuantScheme,
    StoredBlocks,
)
from cardan.plugins.quantization.block_linear import BlockLinear
from cardan.plugins.quantization.layer import Layer
from cardan.plugins.quantization.stored_embedding import StoredEmbedding


class GGUFScheme(QuantScheme):
    """Blocks stay as they are where a provider has kernels for their format.

    Everything else is decoded while it loads and kept in the model's dtype: formats without
    kernels, tensors that are stored in full precision, and cuts that would go through blocks.
    """

    name: ClassVar[str] = "gguf"
    contract: ClassVar[tuple[int, int]] = (1, 0)

    def __init__(self) -> None:
        # Matrices by their format; decoded ones by the model's dtype.
        self._counts: Counter[str] = Counter()

    @classmethod
    def detect(cls, config: Mapping[str, Any]) -> bool:
        """False: it is the file that says so, not its configuration."""
        return False

    def accepts(self, layer: str, in_features: int, out_features: int) -> Verdict:
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
        return _StoredLinear(Layer(ops, in_features, out_features, dtype, device), self._counts)

    def embedding(
        self, ops: OpTable, num_rows: int, hidden: int, dtype: str, device: torch.device
    ) -> EmbeddingMethod:
        return StoredEmbedding(ops, hidden, dtype, device)

    def summary(self) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in self._counts.most_common())
        return f"matrices as stored or decoded: {counts}"


class _StoredLinear(BlockLinear):
    keeps_precision: ClassVar[bool] = True

    def __init__(self, layer: Layer, counts: Counter[str]) -> None:
        super().__init__(layer)
        self._counts = counts

    def load(self, row: int, weight: torch.Tensor) -> None:
        self._counts[self._layer.dtype] += 1
        super().load(row, weight)

    def load_stored(self, row: int, blocks: StoredBlocks) -> bool:
        if not self._layer.has_kernel(blocks.format, blocks.num_rows):
            return False
        self._counts[blocks.format] += 1
        self.add(row, blocks)
        return True
