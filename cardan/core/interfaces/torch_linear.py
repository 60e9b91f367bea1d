"""Linear layers and embeddings in the model's own dtype. Storage that schemes may fall back to."""

from typing import Any, ClassVar

import torch

from cardan.core.interfaces.kernels import Kernel, OpTable
from cardan.core.interfaces.quantization import EmbeddingMethod, LinearMethod

# Kernels read whole words.
_ALIGNMENT = 8


def may_keep(tensor: torch.Tensor, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a checkpoint's tensor can serve as a weight as it is, without a copy.

    It then keeps the mapped file (or the memory that it was decoded to) alive, all of which it
    must be, so that a slice does not hold the rest.
    """
    return (
        tensor.dtype == dtype
        and tensor.device == device
        and tensor.is_contiguous()
        and tensor.untyped_storage().nbytes() == tensor.nbytes
        and tensor.data_ptr() % _ALIGNMENT == 0
    )


class DenseLinear(LinearMethod):
    """A weight [out_features, in_features] in the model's dtype, applied by the op ``linear``."""

    keeps_precision: ClassVar[bool] = True

    def __init__(
        self,
        ops: OpTable,
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        float32_results: bool = False,
    ) -> None:
        """``float32_results``: ``apply_float32`` will be wanted."""
        self._ops = ops
        self._shape = (out_features, in_features)
        self._dtype = dtype
        self._device = device
        self._attributes: dict[str, int | float | str | bool] = {
            "dtype": str(dtype).removeprefix("torch."),
            "in_features": in_features,
            "out_features": out_features,
        }
        self._linear = ops.bind("linear", **self._attributes)
        self._linear_float32: Kernel | None = None
        if float32_results:
            self._linear_float32 = ops.bind("linear_float32", **self._attributes)
        # A tensor as loaded until ``finish``, then whatever form the kernel takes.
        self.weight: Any = None
        # Another's memory is only read.
        self._is_own = False

    def load(self, row: int, weight: torch.Tensor) -> None:
        if weight.shape == self._shape and may_keep(weight, self._dtype, self._device):
            self.weight, self._is_own = weight, False
            return
        if self.weight is None or not self._is_own:
            self.weight = torch.empty(self._shape, dtype=self._dtype, device=self._device)
            self._is_own = True
        self.weight[row : row + weight.shape[0]].copy_(weight)

    def finish(self) -> None:
        # Where a provider keeps a form of its own, the loaded one is given up.
        self.weight = self._ops.prepare("linear", self.weight, **self._attributes)

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out: torch.Tensor = self._linear(x, self.weight, bias)
        return out

    def apply_float32(self, x: torch.Tensor) -> torch.Tensor | None:
        if self._linear_float32 is None:
            return None
        out: torch.Tensor = self._linear_float32(x, self.weight)
        return out


class DenseEmbedding(EmbeddingMethod):
    """A table [num_rows, hidden] in the model's dtype, looked up by the op ``embedding``."""

    def __init__(self, ops: OpTable, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        name = str(dtype).removeprefix("torch.")
        self._embedding = ops.bind("embedding", dtype=name, hidden=hidden)
        self._table: torch.Tensor | None = None

    def load(self, weight: torch.Tensor) -> None:
        if not may_keep(weight, self._dtype, self._device):
            weight = weight.to(device=self._device, dtype=self._dtype, copy=True)
        self._table = weight

    def finish(self) -> None:
        """Nothing to pack."""

    @property
    def table(self) -> torch.Tensor | None:
        return self._table

    def lookup(self, token_ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._embedding(token_ids, self._table)
        return out
