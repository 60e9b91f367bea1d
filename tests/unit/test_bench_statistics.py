"""Figures of a benchmark against NumPy and cases worked by hand."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cardan.bench.record import RequestRecord
from cardan.bench.statistics import (
    Goodput,
    check_percentiles,
    distribution,
    inter_token_latencies,
    parse_goodput,
    summarize,
    time_per_output_token,
)
from cardan.core.types.errors import ConfigError

# Tokens at 1.5, 1.6, 1.8 and 2.5 s; due at 1, sent at 1.25, ended at 2.5.
BY_HAND = RequestRecord(
    index=0,
    due=1.0,
    sent=1.25,
    first_token=1.5,
    token_times=[1.5, 1.6, 1.8, 2.5],
    chunk_tokens=[1, 1, 1, 1],
    end=2.5,
    prompt_tokens=10,
    output_tokens=4,
)
REFUSED = RequestRecord(
    index=1, due=2.0, sent=2.0, end=3.0, error="HTTP 503: queue full", status=503
)


def test_one_request_by_hand():
    found = summarize([BY_HAND])
    assert found["requests"] == {"total": 1, "completed": 1, "failed": 0}
    assert found["errors"] == {}
    assert found["duration_s"] == 1.5
    assert found["prompt_tokens"] == 10
    assert found["output_tokens"] == 4
    assert found["requests_per_s"] == pytest.approx(1 / 1.5)
    assert found["output_tokens_per_s"] == pytest.approx(4 / 1.5)
    assert found["total_tokens_per_s"] == pytest.approx(14 / 1.5)
    assert found["ttft_ms"]["mean"] == pytest.approx(500)
    assert found["e2el_ms"]["mean"] == pytest.approx(1500)
    assert found["from_sent"]["ttft_ms"]["mean"] == pytest.approx(250)
    assert found["from_sent"]["e2el_ms"]["mean"] == pytest.approx(1250)
    assert found["send_delay_ms"]["mean"] == pytest.approx(250)
    assert found["tpot_ms"]["mean"] == pytest.approx(1000 / 3)
    assert found["itl_ms"]["count"] == 3
    assert found["itl_ms"]["max"] == pytest.approx(700)
    assert found["itl_ms"]["median"] == pytest.approx(200)
    assert "goodput" not in found


def test_failed_requests_count_but_have_no_latency():
    found = summarize([BY_HAND, REFUSED])
    assert found["requests"] == {"total": 2, "completed": 1, "failed": 1}
    assert found["errors"] == {"HTTP 503": 1}
    assert found["duration_s"] == 2.0
    assert found["requests_per_s"] == 0.5
    assert found["ttft_ms"]["count"] == found["e2el_ms"]["count"] == 1
    assert found["send_delay_ms"]["count"] == 2


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        ("connection refused: [Errno 111]", None, "connection refused"),
        ("timeout", None, "timeout"),
        ("anything: at all", 429, "HTTP 429"),
        ("stream ended early: no [DONE]", 200, "stream ended early"),
        ("", None, "unknown"),
    ],
)
def test_error_kinds(error, status, kind):
    record = RequestRecord(index=0, due=0.0, sent=0.0, end=1.0, error=error, status=status)
    assert summarize([record])["errors"] == {kind: 1}


def test_nothing_and_no_time_give_no_division_by_zero():
    empty = summarize([])
    assert empty["duration_s"] == 0.0
    assert empty["requests_per_s"] == 0.0
    assert empty["ttft_ms"] == dict.fromkeys(empty["ttft_ms"], None) | {"count": 0}
    instant = summarize([RequestRecord(index=0, due=0.0, sent=0.0, first_token=0.0, end=0.0)])
    assert instant["output_tokens_per_s"] == 0.0
    json.dumps(instant, allow_nan=False)


def test_equal_shapes_for_full_and_empty_runs():
    def shape(value):
        return {key: shape(item) for key, item in value.items()} if isinstance(value, dict) else 0

    assert shape(summarize([BY_HAND])) == shape(summarize([]))


def test_one_token_has_no_time_per_token_and_zero_time_is_one():
    single = RequestRecord(0, 0.0, 0.0, 1.0, [1.0], [1], 1.0, 5, 1)
    assert time_per_output_token(single) is None
    assert inter_token_latencies(single) == []
    together = RequestRecord(0, 0.0, 0.0, 1.0, [1.0], [4], 1.0, 5, 4)
    assert summarize([single, together])["tpot_ms"]["count"] == 1
    assert summarize([single, together])["tpot_ms"]["max"] == 0.0


def test_gaps_are_between_chunks_whatever_they_carry():
    record = RequestRecord(0, 0.0, 0.0, 1.0, [1.0, 1.5, 1.75], [1, 5, 2], 1.75, 5, 8)
    assert inter_token_latencies(record) == [0.5, 0.25]
    assert time_per_output_token(record) == pytest.approx(0.75 / 7)


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50),
    st.lists(st.integers(0, 100), max_size=5, unique=True),
)
def test_distribution_is_numpys(values, percentiles):
    found = distribution(values, percentiles)
    assert found["count"] == len(values)
    assert found["mean"] == pytest.approx(np.mean(values), abs=1e-6)
    assert found["std"] == pytest.approx(np.std(values), abs=1e-6)
    assert (found["min"], found["max"]) == (min(values), max(values))
    for percentile in percentiles:
        expected = np.percentile(values, percentile, method="linear")
        assert found[f"p{percentile}"] == pytest.approx(expected, abs=1e-6)


def test_percentiles_interpolate_linearly():
    found = distribution([1.0, 2.0, 3.0, 4.0], (50, 90, 99.9))
    assert found["median"] == found["p50"] == 2.5
    assert found["p90"] == pytest.approx(3.7)  # rank 0.9 * 3 = 2.7
    assert found["p99.9"] == pytest.approx(3.997)


@given(st.data())
def test_due_figures_are_sent_figures_and_the_delay(data):
    """What waited to be sent is late by its wait: nothing hides it."""
    records = []
    for index in range(data.draw(st.integers(1, 10))):
        due, delay, wait, rest = (data.draw(st.floats(0, 100)) for _ in range(4))
        first = due + delay + wait
        records.append(
            RequestRecord(
                index, due, due + delay, first, [first, first + rest], [1, 1], first + rest, 1, 2
            )
        )
    found = summarize(records)
    for name in ("ttft_ms", "e2el_ms"):
        difference = found[name]["mean"] - found["from_sent"][name]["mean"]
        assert difference == pytest.approx(found["send_delay_ms"]["mean"], abs=1e-6)
        assert found[name]["max"] >= found["from_sent"][name]["max"] - 1e-6
    assert found["duration_s"] == max(item.end for item in records) - min(
        item.due for item in records
    )


@pytest.mark.parametrize(
    ("items", "good"),
    [
        (["ttft:500"], 1),
        (["ttft:499.9"], 0),
        (["e2el:1500"], 1),
        (["e2el:1499"], 0),
        (["tpot:334"], 1),
        (["tpot:333"], 0),
        (["ttft:500 tpot:334", "e2el:1500"], 1),
        (["ttft:500 tpot:300", "e2el:1500"], 0),
    ],
)
def test_goodput_counts_from_the_due_time(items, good):
    found = summarize([BY_HAND, REFUSED], parse_goodput(items))["goodput"]
    assert found["requests"] == good
    assert found["fraction"] == good / 2
    assert found["requests_per_s"] == good / 2.0


def test_goodput_accepts_a_single_token_without_a_time_per_token():
    single = RequestRecord(0, 0.0, 0.0, 1.0, [1.0], [1], 1.0, 5, 1)
    assert Goodput(tpot_ms=1.0).accepts(single)
    assert not Goodput(ttft_ms=999.0).accepts(single)


def test_goodput_without_items_is_none():
    assert parse_goodput([]) is None
    assert parse_goodput(["ttft:500", "e2el:5000"]) == Goodput(ttft_ms=500, e2el_ms=5000)


@pytest.mark.parametrize(
    "item", ["ttft", "ttft:", "ttft:abc", "itl:5", "ttft:-1", "ttft:0", "ttft:nan", "ttft:inf"]
)
def test_bad_goodput_names_the_form(item):
    with pytest.raises(ConfigError, match=r"goodput: .* is not ttft:MS, tpot:MS or e2el:MS"):
        parse_goodput([item])


def test_goodput_twice():
    with pytest.raises(ConfigError, match="ttft is given twice"):
        parse_goodput(["ttft:500", "ttft:400"])


def test_percentiles_are_checked_and_sorted():
    assert check_percentiles([99, 50, 99.9, 50]) == (50, 99, 99.9)
    for bad in (-1, 100.5, float("nan")):
        with pytest.raises(ConfigError, match=r"percentiles: .* is not within 0 to 100"):
            check_percentiles([bad])
