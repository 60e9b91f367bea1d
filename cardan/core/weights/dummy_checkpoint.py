"""Made-up weights of the right shapes, for trying a model's speed and memory without its files."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any, Final

import torch

from cardan.core.interfaces.errors import WeightsError

_STD: Final = 0.02
# Numbers drawn for all tensors: each begins at a place of its own, and a larger one repeats them. A
# prime, so that no row length of a real model divides it and rows differ.
_MAX_DRAWS: Final = 262_139


class DummyCheckpoint:
    """Random tensors: normal with a standard deviation of 0.02, and norms that scale by about 1.

    Values depend on `seed` and the tensor's name only, never on the order of calls. Satisfies
    `Checkpoint`.

    Args:
        config: shaped like a Hugging Face `config.json`.
        shapes: every tensor's shape by its Hugging Face name.
        seed: of the generator.
        device: where tensors are made, best where they are needed, as only the numbers that are
            drawn then travel there; None: on the host.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        shapes: Mapping[str, tuple[int, ...]],
        seed: int,
        device: torch.device | None = None,
    ) -> None:
        self.config = config
        self._shapes = dict(shapes)
        self._seed = seed
        generator = torch.Generator().manual_seed(seed)
        draws = torch.empty(_MAX_DRAWS).normal_(0.0, _STD, generator=generator)
        self._draws = draws.to(device)
        # Gemma's norms scale by 1 + weight.
        gemma = str(config.get("model_type", "")).startswith("gemma")
        self._norm_offset = 0.0 if gemma else 1.0

    def names(self) -> frozenset[str]:
        """The names of all tensors."""
        return frozenset(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        shape = self._shapes.get(name)
        if shape is None:
            raise WeightsError(f"the dummy weights have no tensor {name!r}")
        return shape

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor, made anew at every call; float32 unless `dtype` is given."""
        shape = self.shape(name)
        numel = math.prod(shape)
        digest = hashlib.blake2b(f"{self._seed}:{name}".encode(), digest_size=7).digest()
        draws = self._draws.roll(int.from_bytes(digest, "little") % _MAX_DRAWS)[:numel]
        if name.endswith("norm.weight"):
            draws += self._norm_offset
        draws = draws.to(dtype or torch.float32)
        if numel <= _MAX_DRAWS:
            return draws.reshape(shape)
        out = torch.empty(numel, dtype=draws.dtype, device=draws.device)
        whole = numel // _MAX_DRAWS * _MAX_DRAWS
        out[:whole].view(-1, _MAX_DRAWS).copy_(draws)
        out[whole:].copy_(draws[: numel - whole])
        return out.reshape(shape)

    def stored(self, name: str) -> None:
        """None: the tensors are made in full precision."""
        self.shape(name)

    def release_pages(self) -> None:
        """There is no file."""

    def describe(self, name: str) -> str:
        """Says that the tensor is made up."""
        self.shape(name)
        return f"dummy weights (seed {self._seed})"

    def close(self) -> None:
        """Nothing to give up."""
