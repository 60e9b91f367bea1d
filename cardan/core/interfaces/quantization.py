"""How the weights of linear layers and embeddings are stored and applied."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from cardan.core.interfaces.capabilities import Verdict
from cardan.core.interfaces.kernels import OpTable
from cardan.core.types.ggml import block_format

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """A matrix in quantised blocks, as a file stores it.

    ``format`` is one of ``cardan.core.types.ggml.BLOCK_TYPES``. ``data`` is uint8
    [rows, row bytes], on the host; it may be a view of the mapped file and is never written to.
    ``in_features`` is the number of columns.
    """

    format: str
    in_features: int
    data: "torch.Tensor"

    @property
    def num_rows(self) -> int:
        return int(self.data.shape[0])

    def rows(self, start: int, stop: int) -> "StoredBlocks":
        """Rows ``[start, stop)``, a view."""
        return StoredBlocks(self.format, self.in_features, self.data[start:stop])

    def columns(self, start: int, stop: int) -> "StoredBlocks | None":
        """Columns ``[start, stop)``, a view; None if that would cut blocks."""
        block = block_format(self.format)
        if start % block.elements or stop % block.elements:
            return None
        first, last = (at // block.elements * block.nbytes for at in (start, stop))
        return StoredBlocks(self.format, stop - start, self.data[:, first:last])


@dataclass(frozen=True, slots=True)
class SchemeBlocks(StoredBlocks, ABC):
    """A matrix as the checkpoints of one scheme store it, put together from their tensors.

    ``format`` is a name of the scheme's own, ``data`` has a row for each row of the matrix. What
    belongs to ``data`` (factors, offsets) are fields of subclasses, which cut them, too. A layer
    that is fused or shared out among ranks gets its part by ``rows`` and ``columns``.
    """

    @abstractmethod
    def rows(self, start: int, stop: int) -> "SchemeBlocks":
        """Rows ``[start, stop)``."""

    @abstractmethod
    def columns(self, start: int, stop: int) -> "SchemeBlocks | None":
        """Columns ``[start, stop)``; None if the matrix cannot be cut there."""

    @abstractmethod
    def decoded(self) -> "torch.Tensor":
        """In full precision, [num_rows, in_features], for who does not take it as it is stored."""


class LinearMethod(ABC):
    """Storage and arithmetic of one linear layer with ``out_features`` x ``in_features`` weights.

    ``load`` and ``load_stored`` may be called for consecutive row spans (fused projections), each
    span by one of them, and must cope with any order; ``finish`` is called once after all spans.
    """

    # Whether what ``load`` gets is kept in the model's dtype: a tied head of such a method is given
    # the embedding's own table, so that the two can share it.
    keeps_precision: ClassVar[bool] = False

    @abstractmethod
    def load(self, row: int, weight: "torch.Tensor") -> None:
        """Take rows ``[row, row + weight.shape[0])`` of the weight, full precision.

        ``weight`` is only read; it may be kept, and then holds the checkpoint's memory.
        """

    def load_stored(self, row: int, blocks: StoredBlocks) -> bool:
        """Take rows ``[row, row + blocks.num_rows)`` as they are stored.

        Returns False to get them in full precision instead. ``blocks`` may be kept until
        ``finish``, or for good, and then hold the mapped file.
        """
        return False

    @abstractmethod
    def finish(self) -> None:
        """Pack what was loaded; afterwards ``apply`` works."""

    @abstractmethod
    def apply(self, x: "torch.Tensor", bias: "torch.Tensor | None") -> "torch.Tensor":
        """x [..., in_features] -> [..., out_features]."""

    def apply_float32(self, x: "torch.Tensor") -> "torch.Tensor | None":
        """``apply`` without bias, its results in float32, for the logits; None: it has no way of
        its own, and what ``apply`` returns is converted."""
        return None


class EmbeddingMethod(ABC):
    """Storage and look-up of one table of token embeddings, ``num_rows`` x ``hidden``."""

    @abstractmethod
    def load(self, weight: "torch.Tensor") -> None:
        """Take all rows in full precision; ``weight`` is only read, and may be kept."""

    def load_stored(self, blocks: StoredBlocks) -> bool:
        """Take all rows as they are stored, or return False to get them in full precision."""
        return False

    @abstractmethod
    def finish(self) -> None:
        """Pack what was loaded; afterwards ``lookup`` works."""

    @property
    def table(self) -> "torch.Tensor | None":
        """All rows in the model's dtype, [num_rows, hidden], where that is how they are kept."""
        return None

    @abstractmethod
    def lookup(self, token_ids: "torch.Tensor") -> "torch.Tensor":
        """Rows ``token_ids`` [T] int64: [T, hidden] in the model's dtype."""


class QuantScheme(ABC):
    """A quantisation scheme, found by name in the group ``cardan.quantization``.

    One instance serves one model.
    """

    name: ClassVar[str]
    contract: ClassVar[tuple[int, int]]

    @classmethod
    @abstractmethod
    def detect(cls, config: Mapping[str, Any]) -> bool:
        """Whether a checkpoint's configuration says that it is stored in this scheme."""

    @classmethod
    def for_checkpoint(cls, config: Mapping[str, Any]) -> "QuantScheme":
        """The instance for one model; ``config`` as for ``detect``.

        Raises:
            ConfigError: the checkpoint is stored in a way that the scheme does not know.
        """
        return cls()

    @abstractmethod
    def accepts(self, layer: str, in_features: int, out_features: int) -> Verdict:
        """Whether the layer is (or can be) quantised; a refused layer stays in full precision.

        ``layer`` is its name in the checkpoint, a fused projection's as ``qkv_proj`` and
        ``gate_up_proj``; the sizes are this rank's.
        """

    @abstractmethod
    def linear(
        self,
        ops: OpTable,
        layer: str,
        in_features: int,
        out_features: int,
        dtype: str,
        device: "torch.device",
    ) -> LinearMethod:
        """Storage for one accepted layer."""

    def embedding(
        self, ops: OpTable, num_rows: int, hidden: int, dtype: str, device: "torch.device"
    ) -> EmbeddingMethod | None:
        """Storage for the token embeddings, or None to keep them in full precision."""
        return None

    def tensors_of(self, name: str, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        """The checkpoint's tensors that hold ``name`` (``x.weight``), with their shapes.

        Asked for every tensor that the model needs and the checkpoint does not have by that name;
        ``shape`` is the whole tensor's. Empty: the scheme does not store it otherwise.
        """
        return {}

    def assemble(
        self, name: str, shape: tuple[int, ...], tensors: "Mapping[str, torch.Tensor]"
    ) -> SchemeBlocks:
        """``name`` put together from what ``tensors_of`` named, on the host, which is only read.

        It is offered to the layer's ``load_stored``, and decoded for ``load`` where that declines.
        """
        raise NotImplementedError(f"{type(self).__name__} names tensors and does not assemble them")

    def summary(self) -> str:
        """After loading: what was stored how, in a line for the log."""
        return ""
