"""A logits processor: no run of n tokens comes twice."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from cardan.core.interfaces.logits import LogitsProcessor, RowAdded

if TYPE_CHECKING:
    import torch

    from cardan.core.types.sampling_params import SamplingParams

SETTING = "no_repeat_ngram_size"


class NoRepeatNgramProcessor(LogitsProcessor):
    """``extra_args["no_repeat_ngram_size"]`` n: tokens that would end a run of n tokens which the
    prompt or the answer has already get -inf, as with the setting of that name in transformers."""

    name: ClassVar[str] = "no_repeat_ngram"
    contract: ClassVar[tuple[int, int]] = (1, 0)

    def __init__(self, vocab_size: int, device: "torch.device") -> None:
        self._rows: dict[int, _History] = {}

    def validate(self, params: "SamplingParams") -> str | None:
        size = params.extra_args.get(SETTING, 1)
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            return f"{SETTING} is {size!r}, must be a positive integer"
        return None

    def wants(self, params: "SamplingParams") -> bool:
        return SETTING in params.extra_args

    def update(self, added: Sequence[RowAdded], removed: Sequence[int]) -> None:
        for row in removed:
            # A row whose history could not be made is removed, too.
            self._rows.pop(row, None)
        for item in added:
            history = _History(item.params.extra_args[SETTING])
            for token_id in (*item.prompt_token_ids, *item.output_token_ids):
                history.append(token_id)
            self._rows[item.row] = history

    def apply(
        self, logits: "torch.Tensor", rows: Mapping[int, int], new_tokens: Mapping[int, int]
    ) -> "torch.Tensor":
        for row, index in rows.items():
            history = self._rows[row]
            if row in new_tokens:
                history.append(new_tokens[row])
            banned = history.banned()
            if banned:
                logits[index, banned] = float("-inf")
        return logits


class _History:
    """Which tokens have followed each run of ``size - 1`` tokens of one sequence."""

    def __init__(self, size: int) -> None:
        self._length = size - 1
        self._last: tuple[int, ...] = ()
        self._followers: dict[tuple[int, ...], list[int]] = {}

    def append(self, token_id: int) -> None:
        if len(self._last) == self._length:
            self._followers.setdefault(self._last, []).append(token_id)
        # Not [-length:], which would be everything for a length of 0.
        run = (*self._last, token_id)
        self._last = run[max(0, len(run) - self._length) :]

    def banned(self) -> list[int]:
        return self._followers.get(self._last, [])
