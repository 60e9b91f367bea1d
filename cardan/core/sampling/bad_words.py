"""Words that must not be generated, as sequences of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, inf

from cardan.core.sampling.batch import BatchRows, uploaded
from cardan.core.types.step import Int64

# A place in a tail that no token has filled, and a place in a prefix that any token fits.
_NO_TOKEN = -2
_ANY_TOKEN = -1

Word = tuple[int, ...]


class BadWords:
    """Owns the words of the rows that have some, and the last output tokens of those rows.

    The last token of a word is forbidden whenever the output ends with the tokens before it; the
    prompt does not count. ``tails`` [max_num_rows, L] int64 exists only while some word has
    several tokens; L is the longest prefix seen since then.
    """

    def __init__(self, max_num_rows: int, device: torch.device) -> None:
        self._max_num_rows = max_num_rows
        self._device = device
        self._words: dict[int, tuple[Word, ...]] = {}
        self._tailed: set[int] = set()
        self._tails: Tensor | None = None

    def add(self, row: int, words: Sequence[Word], output_token_ids: Int64) -> None:
        """Take up the words of a row, whose output so far is given."""
        if not words:
            return
        self._words[row] = tuple(dict.fromkeys(tuple(word) for word in words))
        length = max(map(len, words)) - 1
        if length:
            self._tailed.add(row)
            self._fill_tail(row, self._grown_tails(length), output_token_ids)

    def remove(self, row: int) -> None:
        self._words.pop(row, None)
        self._tailed.discard(row)
        if not self._tailed:
            self._tails = None

    @property
    def num_bytes(self) -> int:
        return 0 if self._tails is None else self._tails.nbytes

    def select(self, batch: BatchRows) -> "ForbiddenWords | None":
        members = batch.members(self._words)
        if not members:
            return None
        flat = [(place, word) for place, words in members for word in words]
        places = np.asarray([place for place, _ in flat], np.int64)
        last_tokens = batch.upload([word[-1] for _, word in flat])
        if self._tails is None or all(len(word) == 1 for _, word in flat):
            return ForbiddenWords(batch.upload(places), last_tokens, None)
        length = self._tails.shape[1]
        prefixes = np.full((len(flat), length), _ANY_TOKEN, np.int64)
        for prefix, (_, word) in zip(prefixes, flat, strict=True):
            prefix[length - len(word) + 1 :] = word[:-1]
        tailed = np.asarray([i for i, row in enumerate(batch.rows) if int(row) in self._tailed])
        prefix_match = PrefixMatch(
            tails=self._tails,
            word_rows=batch.upload(batch.rows[places]),
            prefixes=batch.upload(prefixes),
            places=batch.upload(tailed),
            rows=batch.upload(batch.rows[tailed]),
        )
        return ForbiddenWords(batch.upload(places), last_tokens, prefix_match)

    # A table made in inference mode could not be written to outside it.
    @torch.inference_mode(False)
    def _grown_tails(self, length: int) -> Tensor:
        if self._tails is None:
            shape = (self._max_num_rows, length)
            self._tails = torch.full(shape, _NO_TOKEN, dtype=torch.int64, device=self._device)
        missing = length - self._tails.shape[1]
        if missing > 0:
            # Rows that are there already have no word that looks further back.
            padding = self._tails.new_full((self._max_num_rows, missing), _NO_TOKEN)
            self._tails = torch.cat((padding, self._tails), dim=1)
        return self._tails

    def _fill_tail(self, row: int, tails: Tensor, output_token_ids: Int64) -> None:
        length = tails.shape[1]
        tail = np.full(length, _NO_TOKEN, np.int64)
        known = output_token_ids[-length:]
        tail[length - len(known) :] = known
        tails[row] = uploaded(tail, tails.device)


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Words of several tokens in one batch of W words.

    ``tails`` is the table that ``BadWords`` owns, ``word_rows`` [W] the row of each word,
    ``prefixes`` [W, L] what must precede, right-aligned; ``places`` and ``rows`` [M] name the rows
    of the batch whose tails grow, by index in the batch and by row.
    """

    tails: Tensor
    word_rows: Tensor
    prefixes: Tensor
    places: Tensor
    rows: Tensor

    def matches(self) -> Tensor:
        tails = self.tails.index_select(0, self.word_rows)
        return ((tails == self.prefixes) | (self.prefixes == _ANY_TOKEN)).all(1)

    def append(self, token_ids: Tensor) -> None:
        old = self.tails.index_select(0, self.rows)
        new = token_ids.index_select(0, self.places)[:, None]
        self.tails.index_copy_(0, self.rows, torch.cat((old[:, 1:], new), dim=1))


@dataclass(frozen=True, slots=True)
class ForbiddenWords:
    """Forbid ``last_tokens`` [W] at ``places`` [W] of the batch where the prefix matches."""

    places: Tensor
    last_tokens: Tensor
    prefix_match: PrefixMatch | None

    def apply(self, logits: Tensor, num_output_tokens: Int64) -> Tensor:
        pairs = (self.places, self.last_tokens)
        if self.prefix_match is None:
            logits[pairs] = -inf
            return logits
        # Words may end with the same token; adding lets each of them decide alone.
        zero = logits.new_zeros(())
        change = torch.where(self.prefix_match.matches(), zero - inf, zero)
        return logits.index_put_(pairs, change, accumulate=True)

    def record(self, token_ids: Tensor) -> None:
        if self.prefix_match is not None:
            self.prefix_match.append(token_ids)
