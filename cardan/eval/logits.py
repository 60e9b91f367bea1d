"""Comparing the logits of two models as their engines show them.

At each scored position the Kullback-Leibler divergence sum(p * (ln p - ln q)) over the whole
vocabulary, in nats: p is the base's distribution of the next token, q the model's. Logits of one
window of the base are held, those of the model are compared as they come.
"""

from __future__ import annotations

import numpy as np
import torch

from cardan.eval.windows import Window

# Bound of one float64 table of log-probabilities while two are compared.
_PART_BYTES = 16 * 2**20


class LogitsOfWindow:
    """The base's logits at the scored positions of the current window.

    ``show`` runs on the engine's thread while ``Scorer.score`` waits for it.
    """

    def __init__(self) -> None:
        self._first = 0
        self._rows = torch.empty(0, 0)

    def begin(self, window: Window, vocab_size: int) -> None:
        """Expect the logits of another window; the ones before are gone."""
        # The logits at a position predict the token after it.
        self._first = window.first - 1
        wanted = (len(window.scored), vocab_size)
        if self._rows.shape != wanted:
            self._rows = torch.empty(wanted)

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    def show(self, key: int, first: int, logits: torch.Tensor) -> None:
        """Keep what of ``logits`` is scored, in float32 on the host."""
        start, part = self.scored(first, logits)
        self._rows[start : start + len(part)] = part

    def scored(self, first: int, logits: torch.Tensor) -> tuple[int, torch.Tensor]:
        """The part of logits from position ``first`` on that is scored, and its first row."""
        start = first - self._first
        part = logits[max(-start, 0) : max(self.num_rows - start, 0)]
        return max(start, 0), part

    def rows(self, start: int, count: int) -> torch.Tensor:
        """Logits [count, vocab] of scored positions."""
        return self._rows[start : start + count]


class Comparison:
    """Compares the model's logits with the base's as they come, and keeps one number of each."""

    def __init__(self, base: LogitsOfWindow) -> None:
        self._base = base
        self.divergences = np.empty(0)
        self.same_top = np.empty(0, np.bool_)

    def begin(self) -> None:
        """Expect the window that ``base`` holds; its results replace the last window's."""
        self.divergences = np.full(self._base.num_rows, np.nan)
        self.same_top = np.zeros(self._base.num_rows, np.bool_)

    def show(self, key: int, first: int, logits: torch.Tensor) -> None:
        """Compare what of ``logits`` is scored."""
        start, scored = self._base.scored(first, logits)
        size = max(1, _PART_BYTES // (8 * logits.shape[-1]))
        for part in scored.split(size) if len(scored) else ():
            other = part.float().cpu()
            base = self._base.rows(start, len(other))
            place = slice(start, start + len(other))
            self.divergences[place] = divergence(base, other).numpy()
            self.same_top[place] = same_top_token(base, other).numpy()
            start += len(other)


def divergence(base: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """KL(base || other) of logits [n, vocab], in nats and float64: [n].

    Infinite where ``other`` rules out what ``base`` does not.
    """
    p = base.double().log_softmax(-1)
    q = other.double().log_softmax(-1)
    weight = p.exp()
    terms = torch.where(weight > 0, weight * (p - q), 0.0)
    # It is at least 0; rounding may leave less.
    return terms.sum(-1).clamp_min_(0.0)


def same_top_token(base: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """[n] bool: whether the likeliest token of ``base`` is one of the likeliest of ``other``."""
    top = base.argmax(-1, keepdim=True)
    return other.gather(1, top)[:, 0] >= other.amax(-1)
