"""Token embeddings in the blocks in which a file stores them."""

import torch

from cardan.core.interfaces.kernels import REFERENCE, OpTable
from cardan.core.interfaces.quantization import EmbeddingMethod, StoredBlocks
from cardan.core.interfaces.torch_linear import DenseEmbedding


class StoredEmbedding(EmbeddingMethod):
    """A table of stored blocks, used where it lies: only pages of looked-up rows are read.

    What is not in blocks, or in blocks without a kernel, is kept in the model's dtype.
    """

    def __init__(self, ops: OpTable, hidden: int, dtype: str, device: torch.device) -> None:
        self._ops = ops
        self._dtype = dtype
        self._device = device
        self._hidden = hidden
        self._dense = DenseEmbedding(ops, hidden, getattr(torch, dtype), device)
        self._lookup = self._dense.lookup

    def load(self, weight: torch.Tensor) -> None:
        self._dense.load(weight)

    def load_stored(self, blocks: StoredBlocks) -> bool:
        use: dict[str, int | float | str | bool] = {
            "dtype": self._dtype,
            "format": blocks.format,
            "hidden": self._hidden,
        }
        if self._ops.resolve("block_embedding", **use).provider == REFERENCE:
            return False
        run = self._ops.bind("block_embedding", **use)
        data, format = blocks.data.to(self._device), blocks.format
        dtype = getattr(torch, self._dtype)
        self._lookup = lambda token_ids: run(token_ids, data, format, dtype)
        return True

    def finish(self) -> None:
        self._dense.finish()

    @property
    def table(self) -> torch.Tensor | None:
        return self._dense.table

    def lookup(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._lookup(token_ids)
