"""Measuring how long work takes on a device, beside the time that its roofline allows."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cardan.core.interfaces.roofline import Roofline

_SAMPLES = 9
# A sample lasts at least so long, unless one call does.
_SAMPLE_S = 0.004
_MOST_CALLS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a call must do at least: bytes of memory read or written, each once, and operations of
    matrix products (a multiplication and an addition are two).

    ``dtype`` is the one of the products' factors, as ``Roofline.flop_per_s`` names it.
    """

    num_bytes: int
    flop: int = 0
    dtype: str = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedRow:
    """One measurement. Seconds are of one call; ``spread`` is half the distance between the
    quartiles, relative to the median."""

    what: str
    work: Work
    median_s: float
    spread: float
    roofline: Roofline | None

    @property
    def facts(self) -> dict[str, Any]:
        """Plain data for the report. ``floor_s``: the least time; ``ratio``: that to the median."""
        floor, limit = self._floor()
        return {
            "what": self.what,
            "median_s": self.median_s,
            "spread": self.spread,
            "bytes": self.work.num_bytes,
            "flop": self.work.flop,
            "floor_s": floor,
            "ratio": None if floor is None else floor / self.median_s,
            "limit": limit,
            "floor_source": self.roofline.source if self.roofline else "the platform has none",
        }

    def _floor(self) -> tuple[float | None, str]:
        """Least seconds of what is known, and what sets them."""
        if self.roofline is None:
            return None, ""
        floors: dict[str, float] = {}
        rate = self.roofline.flop_per_s.get(self.work.dtype)
        if self.work.flop and rate:
            floors["products"] = self.work.flop / rate
        if self.roofline.bytes_per_s:
            floors["memory"] = self.work.num_bytes / self.roofline.bytes_per_s
        if not floors:
            return None, ""
        limit = max(floors, key=lambda name: floors[name])
        return floors[limit], limit


def measure(call: Callable[[], object], wait: Callable[[], None]) -> tuple[float, float]:
    """(median seconds of ``call``, spread), of several samples after it was warmed up.

    ``wait`` returns when the device has done all that was queued; a sample is many calls and one
    wait, so that queueing overlaps with the work as it does in an engine.
    """
    call()
    wait()
    calls = 1
    while (took := _sample(call, wait, calls)) < _SAMPLE_S and calls < _MOST_CALLS:
        calls = min(_MOST_CALLS, max(2 * calls, int(calls * _SAMPLE_S / max(took, 1e-9))))
    return summary([_sample(call, wait, calls) / calls for _ in range(_SAMPLES)])


def summary(samples: Sequence[float]) -> tuple[float, float]:
    """(median, half the distance between the quartiles relative to it) of at least two samples."""
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    return median, (high - low) / 2 / median


def dense_llama_work(
    config: Mapping[str, Any], dtype: str, item_bytes: int, tokens: int, rows: int, context: int
) -> Work:
    """One step of a Llama without biases or tied weights: ``tokens`` of ``rows`` rows whose
    contexts are ``context`` long on average; each row's last token gets logits.

    The table of embeddings is not read but for the tokens' rows, which are left out.
    """
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    head_dim = hidden // config["num_attention_heads"]
    kv_width = 2 * config["num_key_value_heads"] * head_dim
    per_layer = hidden * (2 * hidden + kv_width + 3 * config["intermediate_size"])
    head = hidden * config["vocab_size"]
    cached = rows * context * layers * kv_width
    return Work(
        num_bytes=item_bytes * (layers * per_layer + head + cached),
        flop=2 * (tokens * layers * per_layer + rows * head),
        dtype=dtype,
    )


def _sample(call: Callable[[], object], wait: Callable[[], None], calls: int) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        call()
    wait()
    return time.perf_counter() - began
