"""A logits processor that adds ``extra_args["acme_shift"]`` to every logit of a row."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from cardan.core.interfaces.logits import LogitsProcessor, RowAdded

if TYPE_CHECKING:
    import torch

    from cardan.core.types.sampling_params import SamplingParams


class ShiftProcessor(LogitsProcessor):
    name: ClassVar[str] = "acme_shift"
    contract: ClassVar[tuple[int, int]] = (1, 0)

    def __init__(self, vocab_size: int, device: "torch.device") -> None:
        self._shifts: dict[int, float] = {}

    def validate(self, params: "SamplingParams") -> str | None:
        shift = params.extra_args.get("acme_shift", 0.0)
        return None if isinstance(shift, int | float) else "acme_shift must be a number"

    def wants(self, params: "SamplingParams") -> bool:
        return "acme_shift" in params.extra_args

    def update(self, added: Sequence[RowAdded], removed: Sequence[int]) -> None:
        for row in removed:
            del self._shifts[row]
        for item in added:
            self._shifts[item.row] = float(item.params.extra_args["acme_shift"])

    def apply(
        self, logits: "torch.Tensor", rows: Mapping[int, int], new_tokens: Mapping[int, int]
    ) -> "torch.Tensor":
        for row, index in rows.items():
            logits[index] += self._shifts[row]
        return logits
