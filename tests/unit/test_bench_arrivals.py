"""Due times against their definitions: rates, spread of the gaps, the integral of a ramp."""

import math
from itertools import islice, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cardan.bench.arrivals import Arrivals, due_times, read_trace
from cardan.core.types.errors import ConfigError


def times(count, seed=0, **settings):
    return list(islice(due_times(Arrivals(**settings), seed), count))


def test_an_infinite_rate_sends_all_at_once():
    assert times(3) == [0.0, 0.0, 0.0]


def test_constant():
    assert times(4, rate=4, pattern="constant") == [0.0, 0.25, 0.5, 0.75]


def test_bursts_keep_the_rate():
    found = times(7, rate=6, pattern="burst", burst_size=3)
    assert found == [0, 0, 0, 0.5, 0.5, 0.5, 1.0]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_and_spread_of_their_gamma_distribution(burstiness):
    gaps = np.diff(times(20_001, rate=50, burstiness=burstiness))
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.06)
    variation = (gaps.std() / gaps.mean()) ** 2
    assert variation == pytest.approx(1 / burstiness, rel=0.1)


def test_poisson_counts_have_the_variance_of_their_mean():
    found = np.array(times(20_000, rate=10))
    counts = np.bincount(found.astype(int))[:-1]
    assert counts.mean() == pytest.approx(10, rel=0.05)
    assert counts.var() == pytest.approx(10, rel=0.15)


@pytest.mark.parametrize(("first", "last"), [(2, 10), (10, 2), (5, 5)])
def test_a_ramp_follows_the_integral_of_its_rate(first, last):
    seconds = 8
    found = times(120, rate=first, pattern="constant", ramp_to=last, ramp_seconds=seconds)

    def expected_count(until):
        inside = min(until, seconds)
        count = first * inside + (last - first) * inside**2 / (2 * seconds)
        return count + max(0.0, until - seconds) * last

    assert [expected_count(time) for time in found] == pytest.approx(range(120), abs=1e-9)


@given(
    seed=st.integers(0, 2**31),
    rate=st.floats(0.01, 1e4),
    burstiness=st.floats(0.05, 50),
    ramp_to=st.none() | st.floats(0.01, 1e4),
)
def test_times_ascend_from_zero_and_depend_on_the_seed_alone(seed, rate, burstiness, ramp_to):
    settings = {"rate": rate, "burstiness": burstiness, "ramp_to": ramp_to}
    found = times(50, seed, **settings)
    assert found[0] == 0
    assert all(earlier <= later for earlier, later in pairwise(found))
    assert found == times(50, seed, **settings)
    assert found != times(50, seed + 1, **settings)


def test_known_times_of_a_seed():
    """Recorded loads stay repeatable from one release to the next."""
    known = [0.0, 1.026316947836881, 1.2358805572318092, 1.69038972611173]
    assert times(4, seed=7, rate=2.0) == pytest.approx(known, abs=1e-12)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rate": 0}, "request_rate is 0"),
        ({"rate": -1}, "request_rate is -1"),
        ({"rate": math.nan}, "request_rate is nan"),
        ({"rate": 1, "burstiness": 0}, "burstiness is 0"),
        ({"rate": 1, "burst_size": 0}, "burst_size is 0"),
        ({"rate": 1, "ramp_to": 0}, "ramp_to is 0"),
        ({"rate": 1, "ramp_to": 2, "ramp_seconds": 0}, "ramp_seconds is 0"),
        ({"ramp_to": 2}, "ramp_to: a ramp goes between two finite rates; set --request-rate"),
    ],
)
def test_impossible_arrivals_name_the_setting(settings, message):
    with pytest.raises(ConfigError, match=message):
        due_times(Arrivals(**settings), 0)


def test_trace(tmp_path):
    path = tmp_path / "trace"
    path.write_text('12.5\n\n{"timestamp": 10, "user": "a"}\n10.25\n')
    assert read_trace(path) == [0.0, 0.25, 2.5]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1\nsoon\n", "line 2: no time"),
        ('1\n{"time": 2}\n', "line 2: no time"),
        ("1\ntrue\n", "line 2: no time"),
        ("1\nNaN\n", "line 2: no time"),
        ("\n", "holds no times"),
    ],
)
def test_a_bad_trace_names_the_line(tmp_path, text, message):
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_trace(path)


def test_a_missing_trace_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"trace .*gone"):
        read_trace(tmp_path / "gone")
