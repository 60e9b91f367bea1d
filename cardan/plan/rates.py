"""How long steps take: floors that no engine can beat, and what measured shares of them promise.

A floor is the longer of two times: all bytes that a step must move at the memory's peak, all its
operations at the peak of their dtypes (the roofline of Williams, Waterman and Patterson, 2009). An
expectation adds up what a step does one after the other, each at the share of the peak that was
measured: products, during which weights are read (the root of the sum of squares: neither hides the
other wholly), attention, and what each layer costs whatever its size.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from cardan.core.interfaces.roofline import Efficiency, Roofline
from cardan.plan.shape import ModelShape
from cardan.plan.weights import ServedWeights

Limit = Literal["bandwidth: weights", "bandwidth: KV cache", "compute", "launches"]


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step, or of one prompt. ``expected_s`` is None where no share is known."""

    floor_s: float
    expected_s: float | None
    limit: Limit


@dataclass(frozen=True, slots=True)
class RateModel:
    """One rank's part of a model on one device.

    ``kv_bytes``: of a token in one layer's cache. ``dtype``: of attention's products.
    ``bytes_per_s``: the roofline's, which is known.
    """

    shape: ModelShape
    weights: ServedWeights
    kv_bytes: int
    dtype: str
    ranks: int
    roofline: Roofline
    bytes_per_s: float

    def decode(self, batch: int, context: int) -> StepTime:
        """A step of ``batch`` sequences that see ``context`` tokens each."""
        seen = batch * sum(_at_most(window, context) for window in self.shape.windows)
        work = _Work(
            weight_bytes=self.weights.read_bytes(batch),
            cache_bytes=float(seen * self.kv_bytes),
            products=self.weights.operations(batch, batch),
            attention=self._attention(seen),
            num_steps=1,
        )
        return self._time(work)

    def prefill(self, length: int, step_tokens: int) -> StepTime:
        """A prompt of ``length`` tokens in steps of at most ``step_tokens``."""
        num_steps = -(-length // step_tokens)
        tokens = min(length, step_tokens)
        work = _Work(
            weight_bytes=num_steps * self.weights.read_bytes(tokens),
            cache_bytes=0.0,
            products=self.weights.operations(length, 1),
            attention=self._attention(
                sum(_causal_pairs(window, length) for window in self.shape.windows)
            ),
            num_steps=num_steps,
        )
        return self._time(work)

    def _attention(self, pairs: float) -> float:
        """Two products for each pair of a query token and a token that it sees."""
        return 4.0 * self.shape.attention_width / self.ranks * pairs

    def _time(self, work: "_Work") -> StepTime:
        peak = self.bytes_per_s
        known = self.roofline.efficiency
        weights, cache = work.weight_bytes / peak, work.cache_bytes / peak
        computing = self._products_s(work, None) + self._attention_s(work, None)
        floor = max(weights + cache, computing)
        if known is None:
            parts: dict[Limit, float] = {
                "bandwidth: weights": weights,
                "bandwidth: KV cache": cache,
                "compute": computing,
            }
            return StepTime(floor, None, max(parts, key=parts.__getitem__))
        weights, cache = weights / known.weights, cache / known.cache
        products, attention = self._products_s(work, known), self._attention_s(work, known)
        launches = work.num_steps * self.shape.num_layers * known.layer_s
        # While a prompt is computed its attention reads no cache; while rows decode it computes
        # next to nothing.
        expected = math.hypot(weights, products) + max(cache, attention) + launches
        parts = {
            "bandwidth: weights": weights,
            "bandwidth: KV cache": cache,
            "compute": products + attention,
            "launches": launches,
        }
        return StepTime(floor, expected, max(parts, key=parts.__getitem__))

    def _products_s(self, work: "_Work", known: Efficiency | None) -> float:
        """Without ``known`` at the peak. What has no peak is not counted."""
        total = 0.0
        for dtype, count in work.products.items():
            peak = self.roofline.flop_per_s.get(dtype)
            if peak is not None:
                total += count / peak / (1.0 if known is None else known.products.get(dtype, 1.0))
        return total

    def _attention_s(self, work: "_Work", known: Efficiency | None) -> float:
        peak = self.roofline.flop_per_s.get(self.dtype)
        if peak is None:
            return 0.0
        return work.attention / peak / (1.0 if known is None else known.attention)


@dataclass(frozen=True, slots=True)
class _Work:
    """What steps move, bytes, and compute, operations; ``products`` with weights, by dtype."""

    weight_bytes: float
    cache_bytes: float
    products: Mapping[str, float]
    attention: float
    num_steps: int


def _at_most(window: int | None, context: int) -> int:
    return context if window is None else min(window, context)


def _causal_pairs(window: int | None, length: int) -> float:
    """Pairs of a token and those that it sees, itself among them, halved on the diagonal."""
    if window is None or window >= length:
        return length * length / 2
    return window * window / 2 + (length - window) * window
