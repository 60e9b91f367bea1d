"""Figures against brute force in exact or plain Python arithmetic."""

import math
import statistics

import numpy as np
import pytest

from cardan.eval.statistics import (
    divergence_figures,
    likelihood_figures,
    perplexity,
    standard_error,
)


def draw(count, seed=0):
    return np.random.default_rng(seed).gamma(2.0, 1.5, count)


@pytest.mark.parametrize("count", [2, 3, 100, 1001])
def test_likelihood(count):
    nll = draw(count)
    found = likelihood_figures(nll, 4 * count)
    values = nll.tolist()
    mean = math.fsum(values) / count
    error = statistics.stdev(values) / math.sqrt(count)
    assert found["mean_nll"] == pytest.approx(mean, rel=1e-12)
    assert found["mean_nll_se"] == pytest.approx(error, rel=1e-12)
    assert found["perplexity"] == pytest.approx(math.exp(mean), rel=1e-12)
    assert found["perplexity_se"] == pytest.approx(math.exp(mean) * error, rel=1e-12)
    bits = math.fsum(value / math.log(2) for value in values)
    assert found["bits_per_byte"] == pytest.approx(bits / (4 * count), rel=1e-12)


def test_one_token_has_no_error():
    found = likelihood_figures(np.array([2.0]), 3)
    assert found["mean_nll_se"] is None
    assert found["perplexity_se"] is None
    assert standard_error(np.array([1.0])) is None


def test_a_uniform_guess_over_256_bytes_costs_8_bits_a_byte():
    found = likelihood_figures(np.full(10, math.log(256)), 10)
    assert found["perplexity"] == pytest.approx(256)
    assert found["bits_per_byte"] == pytest.approx(8)


def test_tokens_without_text():
    assert likelihood_figures(np.array([1.0, 2.0]), 0)["bits_per_byte"] is None


def test_perplexity_beyond_floats():
    assert perplexity(1e4) == math.inf
    assert perplexity(math.inf) == math.inf


def percentile(values, percent):
    """Linear interpolation between the two nearest ranks."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@pytest.mark.parametrize("count", [1, 2, 7, 500])
def test_divergences(count):
    values = draw(count, seed=count)
    found = divergence_figures(values)
    for name, percent in (("median", 50), ("p90", 90), ("p99", 99)):
        assert found[name] == pytest.approx(percentile(values.tolist(), percent), rel=1e-12)
    assert found["mean"] == pytest.approx(math.fsum(values) / count, rel=1e-12)
    assert found["max"] == max(values)
