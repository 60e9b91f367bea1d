"""One rank's part of one linear layer, as its storage needs to know it."""

from dataclasses import dataclass

import torch

from cardan.core.interfaces.kernels import REFERENCE, OpTable


@dataclass(frozen=True, slots=True)
class Layer:
    """Sizes and operations of a layer; ``dtype`` is a dtype name."""

    ops: OpTable
    in_features: int
    out_features: int
    dtype: str
    device: torch.device

    @property
    def torch_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    def use(self, format: str, num_rows: int) -> dict[str, int | float | str | bool]:
        """Attributes of ``block_linear`` for ``num_rows`` of the layer's rows."""
        return {
            "dtype": self.dtype,
            "format": format,
            "in_features": self.in_features,
            "out_features": num_rows,
        }

    def has_kernel(self, format: str, num_rows: int) -> bool:
        """Whether ``num_rows`` rows in ``format`` are multiplied by more than the definition."""
        use = self.use(format, num_rows)
        return self.ops.resolve("block_linear", **use).provider != REFERENCE
