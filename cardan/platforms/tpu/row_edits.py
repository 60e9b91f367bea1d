"""Settings of rows that change logits, on the host."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cardan.core.types.sampling_params import SamplingParams
from cardan.core.types.step import Float32, Int32, Int64, NewRow

# Stands in a bad word where anything may precede.
ANY_TOKEN = -1
# Of repetition, presence and frequency.
NO_PENALTIES = (1.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class RowEdits:
    """What one row does to its logits.

    ``bias`` [V] float32, None: nothing; ``stops`` [n] are forbidden for the first ``min_tokens``
    outputs; ``penalties``: of repetition, presence and frequency; ``words`` [W, L] int32: forbidden
    token last, ``ANY_TOKEN`` before shorter ones.
    """

    bias: Float32 | None
    stops: Int64
    min_tokens: int
    penalties: tuple[float, float, float]
    words: Int32

    @classmethod
    def of(cls, new: NewRow, vocab_size: int) -> "RowEdits | None":
        """None: nothing."""
        params = new.params
        words = _aligned(new.bad_words_token_ids)
        stops = np.unique(np.asarray(new.stop_token_ids, np.int64))
        stops = stops[(stops >= 0) & (stops < vocab_size)]
        min_tokens = params.min_tokens if len(stops) else 0
        bias = _bias(params, vocab_size)
        if bias is None and not (min_tokens or params.has_penalties or len(words)):
            return None
        penalties = (
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )
        return cls(bias, stops, min_tokens, penalties, words)

    def has_bias(self, num_outputs: int) -> bool:
        """Whether something is added to logits by token after so many outputs."""
        return self.bias is not None or num_outputs < self.min_tokens

    def acts(self, num_outputs: int) -> bool:
        """Whether anything changes after so many outputs."""
        is_penalised = self.penalties != NO_PENALTIES
        return self.has_bias(num_outputs) or bool(len(self.words)) or is_penalised


def _aligned(words: Sequence[tuple[int, ...]]) -> Int32:
    distinct = [word for word in dict.fromkeys(map(tuple, words)) if word]
    aligned = np.full((len(distinct), max(map(len, distinct), default=0)), ANY_TOKEN, np.int32)
    for line, word in zip(aligned, distinct, strict=True):
        line[-len(word) :] = word
    return aligned


def _bias(params: SamplingParams, vocab_size: int) -> Float32 | None:
    if params.allowed_token_ids is None and not params.logit_bias:
        return None
    bias = np.zeros(vocab_size, np.float32)
    for token, value in (params.logit_bias or {}).items():
        bias[token] = value
    if params.allowed_token_ids is not None:
        forbidden = np.ones(vocab_size, np.bool_)
        forbidden[list(params.allowed_token_ids)] = False
        bias[forbidden] = -np.inf
    return bias
