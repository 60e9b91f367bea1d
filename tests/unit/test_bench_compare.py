"""Verdicts of a comparison: known effects are found, noise is not called one."""

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cardan.bench.compare import (
    bootstrap_ratio,
    compare,
    differences,
    render_comparison,
)
from cardan.bench.result import Result
from cardan.core.types.errors import ConfigError


def results(values, name="ttft_ms", **changes):
    """One result whose repeats have ``values`` for one figure."""
    fields = {
        "kind": "latency",
        "model": "demo",
        "config": {"load": {"input_len": 32}},
        "metrics": {},
        "samples": [{name: value} for value in values],
        "host": {"processor": "p", "cpus": 2},
    }
    return [Result(**(fields | changes))]


def verdict(base, other, name):
    [found] = compare(results(base, name), results(other, name))
    return found.verdict


@pytest.mark.parametrize(
    ("name", "lower", "higher"),
    [
        ("ttft_ms", "better", "worse"),
        ("ready_s", "better", "worse"),
        ("startup_s.weights", "better", "worse"),
        ("peak_rss_bytes", "better", "worse"),
        ("requests.failed", "better", "worse"),
        ("errors.timeout", "better", "worse"),
        ("output_tokens_per_s", "worse", "better"),
        ("goodput.requests_per_s", "worse", "better"),
        ("goodput.fraction", "worse", "better"),
        ("prefix_hit_rate", "changed", "changed"),
    ],
)
def test_directions(name, lower, higher):
    assert verdict([10, 11, 12], [5, 5.5, 6], name) == lower
    assert verdict([10, 11, 12], [20, 22, 24], name) == higher
    assert verdict([10, 11, 12], [10.5, 11, 11.5], name) == "within noise"


def test_failures_that_were_none_before_are_worse():
    assert verdict([0, 0, 0], [8, 7, 8], "requests.failed") == "worse"
    assert verdict([8, 0, 7], [0, 0, 0], "requests.failed") == "within noise"
    assert verdict([0, 0, 0], [0, 8, 8], "requests.failed") == "within noise"
    assert verdict([0, 0, 0], [0, 0, 0], "requests.failed") == "within noise"
    assert verdict([0.0, 0.0, 0.0], [0.5, 0.4, 0.5], "goodput.fraction") == "better"


def test_figures_by_hand():
    [found] = compare(results([10, 12, 14]), results([6, 7, 5]))
    assert (found.base.median, found.base.low, found.base.high) == (12, 10, 14)
    assert found.ratio == 0.5
    # Resampled medians of three are mostly its three values: ratios from 5/14 to 7/10.
    assert found.interval == (pytest.approx(5 / 14), pytest.approx(0.7))


def test_few_repeats_get_no_verdict():
    [found] = compare(results([10, 10]), results([1, 1, 1]))
    assert found.verdict == "too few repeats"
    assert found.interval is None
    assert found.ratio == 0.1


def test_repeats_of_several_runs_add_up():
    base = [*results([10]), *results([11]), *results([12])]
    [found] = compare(base, results([20, 21, 22]))
    assert found.base.count == 3
    assert found.verdict == "worse"


def test_zero_has_no_ratio():
    [found] = compare(results([0, 0, 0]), results([1, 1, 1]))
    assert found.ratio is None
    assert found.interval is None


@given(
    st.lists(st.floats(1, 1e6), min_size=3, max_size=8),
    st.lists(st.floats(1, 1e6), min_size=3, max_size=8),
    st.floats(0.001, 1000),
)
def test_interval_holds_the_ratio_and_scales(base, other, factor):
    low, high = bootstrap_ratio(base, other)
    ratio = statistics.median(other) / statistics.median(base)
    assert low <= ratio * (1 + 1e-9)
    assert high >= ratio * (1 - 1e-9)
    assert min(other) / max(base) <= low * (1 + 1e-9)
    assert high <= max(other) / min(base) * (1 + 1e-9)
    scaled = bootstrap_ratio(base, [value * factor for value in other])
    assert scaled == (pytest.approx(low * factor), pytest.approx(high * factor))


def test_noise_is_seldom_called_an_effect_and_effects_are_found():
    """Five repeats of the same thing with 3 % noise, and of one that is 20 % slower."""
    rng = random.Random(1)

    def draw(mean):
        return [rng.gauss(mean, 3) for _ in range(5)]

    rounds = 60
    false = sum(verdict(draw(100), draw(100), "ttft_ms") != "within noise" for _ in range(rounds))
    found = sum(verdict(draw(100), draw(120), "ttft_ms") == "worse" for _ in range(rounds))
    assert false <= rounds * 0.2
    assert found == rounds


def test_different_configurations_are_refused_by_name():
    base = results([1, 2, 3])
    other = results([1, 2, 3], config={"load": {"input_len": 64}, "engine": {}}, model="other")
    with pytest.raises(ConfigError) as caught:
        compare(base, other)
    message = str(caught.value)
    assert "model is 'demo' and 'other'" in message
    assert "config.load.input_len is 32 and 64" in message
    assert "--force" in message
    assert len(compare(base, other, force=True)) == 1


def test_machines_are_part_of_it_but_dates_and_labels_are_not():
    base = results([1, 2, 3])
    assert differences(base[0], results([4], host={"processor": "q", "cpus": 2})[0]) == [
        "host.processor is 'p' and 'q'"
    ]
    assert differences(base[0], results([4], device={"name": "d"})[0]) == [
        "device.name is None and 'd'"
    ]
    same = results([4], label="x", date="then", commit="c", cardan_version="9", metadata={"a": "b"})
    assert differences(base[0], same[0]) == []


def test_kinds_cannot_be_forced():
    with pytest.raises(ConfigError, match="a latency and a serve result cannot be compared"):
        compare(results([1]), results([1], kind="serve"), force=True)


def test_no_samples():
    with pytest.raises(ConfigError, match="has no samples"):
        compare(results([]), results([1]))


def serve_results(factor):
    sample = {
        "requests.completed": 10.0,
        "prompt_tokens": 100.0,
        "ttft_ms.count": 10.0,
        "ttft_ms.mean": 5.0 * factor,
        "ttft_ms.median": 4.0 * factor,
        "ttft_ms.p99": 9.0 * factor,
        "goodput.limits.ttft_ms": 5.0,
        "output_tokens_per_s": 7.0,
    }
    return results([], kind="serve", samples=[dict(sample) for _ in range(3)])


def test_medians_and_p99_stand_for_a_distribution():
    found = compare(serve_results(1), serve_results(2))
    assert [item.metric for item in found] == [
        "requests.completed",
        "ttft_ms.median",
        "ttft_ms.p99",
        "output_tokens_per_s",
    ]
    [named] = compare(serve_results(1), serve_results(2), metrics=["ttft_ms.mean"])
    assert named.ratio == 2.0
    with pytest.raises(ConfigError, match=r"no figure ttft_ms\.p9, did you mean ttft_ms\.p99"):
        compare(serve_results(1), serve_results(2), metrics=["ttft_ms.p9"])


def test_table():
    text = render_comparison(compare(results([10, 12, 14]), results([6, 7, 5])), ("old", "new"))
    header, row = text.splitlines()
    assert header.split() == ["old", "new", "ratio", "95", "%", "of", "it", "verdict"]
    assert "12 [10..14]" in row
    assert "0.500" in row
    assert row.endswith("better")
