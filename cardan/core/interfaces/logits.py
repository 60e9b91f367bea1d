"""Logits processors: plugins that change logits before sampling."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch

    from cardan.core.types.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class RowAdded:
    """A sequence that entered a row. ``output_token_ids`` grows as the sequence does.

    It is what is known when the sequence enters (not empty after a preemption).
    """

    row: int
    params: "SamplingParams"
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]


class LogitsProcessor(ABC):
    """Changes the logits of the rows it wants, found in the group ``cardan.logits_processors``.

    One object serves all rows of an engine. Rows and their settings arrive as changes; a step
    calls ``apply`` once for all rows. Processors run after penalties, bias and masks of the
    sampling parameters and before temperature.
    """

    name: ClassVar[str]
    contract: ClassVar[tuple[int, int]]

    @abstractmethod
    def __init__(self, vocab_size: int, device: "torch.device") -> None: ...

    @abstractmethod
    def validate(self, params: "SamplingParams") -> str | None:
        """Why ``params.extra_args`` are unusable, or None; called before admission."""

    @abstractmethod
    def wants(self, params: "SamplingParams") -> bool:
        """Whether rows with these params are to be processed at all."""

    @abstractmethod
    def update(self, added: Sequence[RowAdded], removed: Sequence[int]) -> None:
        """Rows that were removed, then rows that were added; only rows that are wanted."""

    @abstractmethod
    def apply(
        self, logits: "torch.Tensor", rows: Mapping[int, int], new_tokens: Mapping[int, int]
    ) -> "torch.Tensor":
        """logits [N, vocab_size] float32 -> the same or another tensor.

        ``rows`` maps wanted rows to their index in ``logits``; ``new_tokens`` maps those rows to
        the token that was sampled last, where one was.
        """

    def state(self) -> Mapping[str, Any]:
        """(optional) Facts for debugging. Default: none."""
        return {}
