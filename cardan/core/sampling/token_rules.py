"""Settings that name single tokens: allowed ids, bias, and stop tokens before ``min_tokens``."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor, inf

from cardan.core.sampling.batch import BatchRows
from cardan.core.types.sampling_params import SamplingParams
from cardan.core.types.step import Float32, Int64


class TokenRules:
    """Owns the token lists of the rows that have such settings; other rows cost nothing."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._allowed: dict[int, Int64] = {}
        self._bias: dict[int, tuple[Int64, Float32]] = {}
        self._early_stops: dict[int, tuple[int, Int64]] = {}

    def add(self, row: int, params: SamplingParams, stop_token_ids: tuple[int, ...]) -> None:
        """Take up the settings of a row. Stop tokens outside the vocabulary cannot be sampled."""
        if params.allowed_token_ids is not None:
            self._allowed[row] = np.unique(np.asarray(params.allowed_token_ids, np.int64))
        if params.logit_bias:
            tokens = np.fromiter(params.logit_bias.keys(), np.int64)
            values = np.fromiter(params.logit_bias.values(), np.float32)
            self._bias[row] = (tokens, values)
        if params.min_tokens > 0:
            stops = np.unique(np.asarray(stop_token_ids, np.int64))
            stops = stops[(stops >= 0) & (stops < self._vocab_size)]
            if len(stops):
                self._early_stops[row] = (params.min_tokens, stops)

    def remove(self, row: int) -> None:
        self._allowed.pop(row, None)
        self._bias.pop(row, None)
        self._early_stops.pop(row, None)

    def allowed(self, batch: BatchRows) -> "AllowedTokens | None":
        members = batch.members(self._allowed)
        if not members:
            return None
        places, tokens = _ragged([(place, ids) for place, ids in members])
        return AllowedTokens(
            rows=batch.upload([place for place, _ in members]),
            places=batch.upload(places),
            tokens=batch.upload(tokens),
        )

    def bias(self, batch: BatchRows) -> "TokenBias | None":
        members = batch.members(self._bias)
        if not members:
            return None
        places, tokens = _ragged([(place, ids) for place, (ids, _) in members])
        values = np.concatenate([values for _, (_, values) in members])
        return TokenBias(batch.upload(places), batch.upload(tokens), batch.upload(values))

    def early_stops(self, batch: BatchRows) -> "EarlyStops | None":
        members = batch.members(self._early_stops)
        if not members:
            return None
        places, tokens = _ragged([(place, ids) for place, (_, ids) in members])
        limits = np.repeat([limit for _, (limit, _) in members], [len(m[1][1]) for m in members])
        return EarlyStops(batch, limits, places, tokens)


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    """Forbid all but some tokens in ``rows``: pairs (``places``, ``tokens``) keep their logits."""

    rows: Tensor
    places: Tensor
    tokens: Tensor

    def apply(self, logits: Tensor, num_output_tokens: Int64) -> Tensor:
        kept = logits[self.places, self.tokens]
        logits.index_fill_(0, self.rows, -inf)
        logits[self.places, self.tokens] = kept
        return logits

    def record(self, token_ids: Tensor) -> None:
        pass


@dataclass(frozen=True, slots=True)
class TokenBias:
    """Add ``values`` at the distinct pairs (``places``, ``tokens``)."""

    places: Tensor
    tokens: Tensor
    values: Tensor

    def apply(self, logits: Tensor, num_output_tokens: Int64) -> Tensor:
        logits[self.places, self.tokens] += self.values
        return logits

    def record(self, token_ids: Tensor) -> None:
        pass


class EarlyStops:
    """Forbid stop tokens at pairs (place, token) while the row has fewer outputs than its limit."""

    def __init__(self, batch: BatchRows, limits: Int64, places: Int64, tokens: Int64) -> None:
        self._batch = batch
        self._limits = limits
        self._places = places
        self._tokens = tokens
        self._active = np.zeros(len(places), np.bool_)
        self._pairs: tuple[Tensor, Tensor] | None = None

    def apply(self, logits: Tensor, num_output_tokens: Int64) -> Tensor:
        active = num_output_tokens[self._places] < self._limits
        if not np.array_equal(active, self._active):
            self._active = active
            self._pairs = None
            if active.any():
                self._pairs = (
                    self._batch.upload(self._places[active]),
                    self._batch.upload(self._tokens[active]),
                )
        if self._pairs is not None:
            logits[self._pairs] = -inf
        return logits

    def record(self, token_ids: Tensor) -> None:
        pass


def _ragged(lists: list[tuple[int, Int64]]) -> tuple[Int64, Int64]:
    """Flatten (place, tokens) lists into pairs."""
    lengths = [len(tokens) for _, tokens in lists]
    places = np.repeat(np.asarray([place for place, _ in lists], np.int64), lengths)
    return places, np.concatenate([tokens for _, tokens in lists])
