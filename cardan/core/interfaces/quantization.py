"""How a linear layer's weight is stored and applied."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from cardan.core.interfaces.capabilities import Verdict
from cardan.core.interfaces.kernels import OpTable

if TYPE_CHECKING:
    import torch


class LinearMethod(ABC):
    """Storage and arithmetic of one linear layer with ``out_features`` x ``in_features`` weights.

    ``load`` may be called for consecutive row spans (fused projections) and must cope with any
    order; ``finish`` is called once after all spans.
    """

    @abstractmethod
    def load(self, row: int, weight: "torch.Tensor") -> None:
        """Take rows ``[row, row + weight.shape[0])`` of the weight, full precision."""

    @abstractmethod
    def finish(self) -> None:
        """Pack what was loaded; afterwards ``apply`` works."""

    @abstractmethod
    def apply(self, x: "torch.Tensor", bias: "torch.Tensor | None") -> "torch.Tensor":
        """x [..., in_features] -> [..., out_features]."""


class QuantScheme(ABC):
    """A quantisation scheme, found by name in the group ``cardan.quantization``."""

    name: ClassVar[str]
    contract: ClassVar[tuple[int, int]]

    @classmethod
    @abstractmethod
    def detect(cls, config: Mapping[str, Any]) -> bool:
        """Whether a checkpoint's configuration says that it is stored in this scheme."""

    @abstractmethod
    def accepts(self, layer: str, in_features: int, out_features: int) -> Verdict:
        """Whether the layer is (or can be) quantised; a refused layer stays in full precision."""

    @abstractmethod
    def linear(
        self, ops: OpTable, in_features: int, out_features: int, dtype: str, device: "torch.device"
    ) -> LinearMethod:
        """Storage for one layer."""
