"""What the features of sampling share: rows of one batch, and the edits that they ask for."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cardan.core.types.step import Int64

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BatchRows:
    """The sampling rows of a batch.

    ``rows`` [S] int64, distinct; ``places`` [max_num_rows] int64: index of a row in the batch, -1
    for rows outside it.
    """

    rows: Int64
    places: Int64
    device: torch.device

    def members(self, entries: Mapping[int, T]) -> list[tuple[int, T]]:
        """(index in the batch, entry) of the rows that have an entry, in order of index."""
        if not entries:
            return []
        keys = np.fromiter(entries, np.int64, len(entries))
        found = keys[self.places[keys] >= 0].tolist()
        return sorted(((int(self.places[row]), entries[row]) for row in found), key=_first)

    def upload(self, values: Any, dtype: torch.dtype | None = None) -> Tensor:
        """As ``uploaded``, to the batch's device."""
        return uploaded(values, self.device, dtype)

    def index(self, places: npt.ArrayLike) -> Tensor | None:
        """Device index [M] of some places of the batch; None stands for all of them in order."""
        host = np.asarray(places, np.int64)
        whole = np.array_equal(host, np.arange(len(self.rows)))
        return None if whole else self.upload(host)


class LogitsEdit(Protocol):
    """A change of logits for one batch, prepared once and applied in each step of that batch."""

    def apply(self, logits: Tensor, num_output_tokens: Int64) -> Tensor:
        """logits [S, V] -> the same tensor, written in place, or another one."""

    def record(self, token_ids: Tensor) -> None:
        """Take note of the sampled tokens [S]."""


def _first(pair: tuple[int, Any]) -> int:
    return pair[0]


def uploaded(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A device tensor of host values, which are read before this returns; the copy takes its turn
    among what is queued, and nothing waits for it."""
    host = torch.from_numpy(np.require(values, requirements="W"))
    # Converted here: the device may not know the host's dtype.
    return host.to(dtype or host.dtype).to(device, non_blocking=True)


def take(values: Tensor, index: Tensor | None) -> Tensor:
    """Rows of a tensor; the tensor itself where ``index`` is None."""
    return values if index is None else values.index_select(0, index)


def put(values: Tensor, index: Tensor | None, new: Tensor) -> Tensor:
    """Replace rows in place; ``new`` itself where ``index`` is None."""
    return new if index is None else values.index_copy_(0, index, new)
