"""Figures of a run from its records.

Percentiles interpolate linearly between the two nearest values (NumPy's default). The standard
deviation is that of the values themselves (divided by their count). Failed requests count in
``requests`` and ``errors`` only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from cardan.bench.record import RequestRecord
from cardan.core.types.errors import ConfigError

DEFAULT_PERCENTILES: tuple[float, ...] = (50.0, 90.0, 95.0, 99.0)


@dataclass(frozen=True, slots=True)
class Goodput:
    """Limits that a good request keeps, milliseconds, from its due time; None sets no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2el_ms: float | None = None

    def accepts(self, record: RequestRecord) -> bool:
        """Whether a request was answered within all limits. One token has no time per token."""
        if record.error is not None:
            return False
        ttft = None if record.first_token is None else record.first_token - record.due
        pairs = (
            (self.ttft_ms, ttft),
            (self.tpot_ms, time_per_output_token(record)),
            (self.e2el_ms, record.end - record.due),
        )
        return all(
            limit is None or seconds is None or seconds * 1000 <= limit for limit, seconds in pairs
        )


def parse_goodput(items: Sequence[str]) -> Goodput | None:
    """Limits such as ``ttft:500 tpot:50 e2el:5000`` (milliseconds); None for no items.

    Raises:
        ConfigError: an item is not NAME:MILLISECONDS, or names a limit twice.
    """
    limits: dict[str, float] = {}
    for item in " ".join(items).split():
        name, _, value = item.partition(":")
        try:
            number = float(value)
        except ValueError:
            number = 0.0
        if name not in ("ttft", "tpot", "e2el") or not 0 < number < float("inf"):
            raise ConfigError(
                f"goodput: {item!r} is not ttft:MS, tpot:MS or e2el:MS with milliseconds above 0"
            )
        if f"{name}_ms" in limits:
            raise ConfigError(f"goodput: {name} is given twice; give it once")
        limits[f"{name}_ms"] = number
    return Goodput(**limits) if limits else None


def check_percentiles(percentiles: Sequence[float]) -> tuple[float, ...]:
    """The percentiles, ascending, each once.

    Raises:
        ConfigError: one is not within 0 to 100.
    """
    for value in percentiles:
        if not 0 <= value <= 100:
            raise ConfigError(f"percentiles: {value:g} is not within 0 to 100")
    return tuple(sorted(set(percentiles)))


def time_per_output_token(record: RequestRecord) -> float | None:
    """Seconds a token after the first one; None for answers of less than two tokens."""
    if record.first_token is None or record.output_tokens < 2:
        return None
    return (record.end - record.first_token) / (record.output_tokens - 1)


def inter_token_latencies(record: RequestRecord) -> list[float]:
    """Seconds between chunks that carried tokens, as a reader of the stream sees them."""
    return [
        later - earlier
        for earlier, later in zip(record.token_times, record.token_times[1:], strict=False)
    ]


def distribution(
    values: Sequence[float], percentiles: Sequence[float] = DEFAULT_PERCENTILES
) -> dict[str, float | None]:
    """Count, mean, std, min, median, max and percentiles; all None but the count for no values."""
    names = ["mean", "std", "min", "median", "max", *(f"p{value:g}" for value in percentiles)]
    if not values:
        return {"count": 0, **dict.fromkeys(names)}
    array = np.asarray(values, dtype=np.float64)
    found = [array.mean(), array.std(), array.min(), np.median(array), array.max()]
    found += list(np.percentile(array, list(percentiles))) if percentiles else []
    return {
        "count": len(values),
        **{name: float(value) for name, value in zip(names, found, strict=True)},
    }


def summarize(
    records: Sequence[RequestRecord],
    goodput: Goodput | None = None,
    percentiles: Sequence[float] = DEFAULT_PERCENTILES,
) -> dict[str, Any]:
    """All figures of a run.

    ``duration_s`` is from the first due time to the last end. Times are milliseconds; rates are of
    answered requests over the duration. ``ttft_ms`` and ``e2el_ms`` count from the due time, so
    that time spent waiting to be sent is not left out; ``from_sent`` has both from the time of
    sending, and ``send_delay_ms`` is the difference. ``goodput`` is there only with limits.
    """
    done = [record for record in records if record.error is None]
    streamed = [record for record in done if record.first_token is not None]
    duration = _duration(records)
    prompt_tokens = sum(record.prompt_tokens for record in done)
    output_tokens = sum(record.output_tokens for record in done)

    def in_ms(seconds: Sequence[float]) -> dict[str, float | None]:
        return distribution([value * 1000 for value in seconds], percentiles)

    figures: dict[str, Any] = {
        "requests": {
            "total": len(records),
            "completed": len(done),
            "failed": len(records) - len(done),
        },
        "errors": dict(sorted(Counter(map(_error_kind, _failed(records))).items())),
        "duration_s": duration,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "requests_per_s": _rate(len(done), duration),
        "output_tokens_per_s": _rate(output_tokens, duration),
        "total_tokens_per_s": _rate(prompt_tokens + output_tokens, duration),
        "ttft_ms": in_ms([(item.first_token or 0.0) - item.due for item in streamed]),
        "tpot_ms": in_ms(
            [value for item in done if (value := time_per_output_token(item)) is not None]
        ),
        "itl_ms": in_ms([gap for item in done for gap in inter_token_latencies(item)]),
        "e2el_ms": in_ms([item.end - item.due for item in done]),
        "from_sent": {
            "ttft_ms": in_ms([(item.first_token or 0.0) - item.sent for item in streamed]),
            "e2el_ms": in_ms([item.end - item.sent for item in done]),
        },
        "send_delay_ms": in_ms([item.sent - item.due for item in records]),
    }
    if goodput is not None:
        good = sum(goodput.accepts(record) for record in records)
        figures["goodput"] = {
            "limits": {name: value for name, value in asdict(goodput).items() if value},
            "requests": good,
            "fraction": good / len(records) if records else None,
            "requests_per_s": _rate(good, duration),
        }
    return figures


def _duration(records: Sequence[RequestRecord]) -> float:
    if not records:
        return 0.0
    return max(item.end for item in records) - min(item.due for item in records)


def _rate(count: int, duration: float) -> float:
    return count / duration if duration > 0 else 0.0


def _failed(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    return [record for record in records if record.error is not None]


def _error_kind(record: RequestRecord) -> str:
    """``HTTP 503``, or what stands before the first colon of the error."""
    if record.status is not None and record.status >= 400:
        return f"HTTP {record.status}"
    return (record.error or "").partition(":")[0].strip() or "unknown"
