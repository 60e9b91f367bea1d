"""What a model loader sees of a model's weights, whatever files they come from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from cardan.core.interfaces.quantization import StoredBlocks


class Checkpoint(Protocol):
    """Named tensors and the config of one model, under Hugging Face names.

    Every method that takes a name raises `WeightsError` if the checkpoint has no such tensor.
    """

    @property
    def config(self) -> Mapping[str, Any]:
        """The model's config in the shape of a Hugging Face `config.json`."""
        ...

    def names(self) -> frozenset[str]:
        """The names of all tensors."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading its data."""
        ...

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor in host memory.

        It may be a view of the mapped file where nothing has to be converted, so it must not be
        written to. With `dtype` None it has the type it is stored in, or float32 if it is stored
        quantised.
        """
        ...

    def stored(self, name: str) -> StoredBlocks | None:
        """A matrix as it is stored, if that is in quantised blocks that operations know.

        It may be a view of the mapped file, so it must not be written to.
        """
        ...

    def release_pages(self) -> None:
        """Let go of the file pages that were read, which then count as this process's no more.

        Tensors handed out stay valid: what is looked at again comes back from the page cache.
        """
        ...

    def describe(self, name: str) -> str:
        """Where a tensor comes from, for messages: `model-00001-of-00002.safetensors`."""
        ...

    def close(self) -> None:
        """Give up the files. Tensors handed out stay valid. Safe to call again."""
        ...
