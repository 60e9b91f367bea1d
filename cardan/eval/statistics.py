"""Figures from scored tokens.

Standard errors are those of a mean of independent values, s / sqrt(n) with s from n - 1 degrees of
freedom. Percentiles interpolate linearly between the two nearest values (NumPy's default).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]


def standard_error(values: Float64) -> float | None:
    """Of the mean; None for fewer than two values."""
    if len(values) < 2:
        return None
    return float(values.std(ddof=1)) / math.sqrt(len(values))


def perplexity(mean_nll: float) -> float:
    """exp of a mean negative log-likelihood; infinite where that is beyond a float."""
    return math.exp(mean_nll) if mean_nll < 700 else math.inf


def likelihood_figures(nll: Float64, num_bytes: int) -> dict[str, float | None]:
    """Figures of tokens' negative log-likelihoods (nats) that stand for ``num_bytes`` of text.

    ``perplexity_se`` is the standard error of the mean carried over to its exp (the delta method).
    """
    mean, error = float(nll.mean()), standard_error(nll)
    value = perplexity(mean)
    return {
        "perplexity": value,
        "perplexity_se": None if error is None else value * error,
        "mean_nll": mean,
        "mean_nll_se": error,
        "bits_per_byte": float(nll.sum()) / math.log(2) / num_bytes if num_bytes else None,
    }


def divergence_figures(divergences: Float64) -> dict[str, float]:
    """Distribution of the divergences (nats) of single positions."""
    p50, p90, p99 = np.percentile(divergences, (50, 90, 99)).tolist()
    mean, largest = float(divergences.mean()), float(divergences.max())
    return {"mean": mean, "median": p50, "p90": p90, "p99": p99, "max": largest}
