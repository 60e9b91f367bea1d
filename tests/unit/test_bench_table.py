"""Tables for the terminal."""

import pytest

from cardan.bench.result import Result
from cardan.bench.statistics import distribution
from cardan.bench.table import render_figure, render_number, render_result, render_table


def test_columns_line_up():
    text = render_table(("", "a", "long"), [("x", "1", "2"), ("name", "333", "")])
    assert text.splitlines() == ["        a  long", "x       1     2", "name  333"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0, "0"),
        (3.0, "3"),
        (-2, "-2"),
        (0.012344, "0.01234"),
        (12.345, "12.35"),
        (999.96, "1000"),
        (12345.6, "12346"),
        (123456789.0, "123456789"),
    ],
)
def test_numbers(value, text):
    assert render_number(value) == text


def test_bytes_are_mebibytes():
    assert render_figure("peak_rss_bytes", 3 * 2**20) == "3 MiB"
    assert render_figure("peak_rss_bytes", None) == "-"
    assert render_figure("ttft_ms", 2.5) == "2.5"


def test_result():
    result = Result(
        kind="throughput",
        model="demo",
        config={"load": {"input_len": 32, "dataset_path": None}},
        metrics={
            "output_tokens_per_s": distribution([1.0, 2.0, 3.0], ()),
            "peak_rss_bytes": distribution([2.0**20] * 3, ()),
            "startup_s": 1.25,
            "errors": {"timeout": 2},
            "from_sent": {"ttft_ms": distribution([5.0])},
            "missing": None,
        },
        samples=[],
        device={"platform": "cpu", "name": "a chip"},
        notes=["careful"],
        interrupted=True,
    )
    blocks = render_result(result).split("\n\n")
    assert blocks[0] == "throughput demo on cpu a chip"
    assert blocks[1] == "input_len=32"
    assert blocks[2].splitlines()[1].split() == ["startup_s", "1.25"]
    assert blocks[2].splitlines()[2].split() == ["errors.timeout", "2"]
    header, rates, memory = blocks[3].splitlines()
    assert header.split() == ["count", "mean", "std", "min", "median", "max"]
    assert rates.split() == ["output_tokens_per_s", "3", "2", "0.8165", "1", "2", "3"]
    assert memory.split()[:2] == ["peak_rss_bytes", "3"]
    assert "1 MiB" in memory
    assert "from_sent.ttft_ms" in blocks[4]
    assert blocks[4].split()[:6] == ["count", "mean", "std", "min", "median", "max"]
    assert blocks[4].splitlines()[0].split()[6:] == ["p90", "p95", "p99"]
    assert blocks[5] == "note: careful"
    assert blocks[6].startswith("interrupted")
    assert len(blocks) == 7
    assert all(len(line) == len(line.rstrip()) for line in render_result(result).splitlines())


def test_long_settings_are_wrapped():
    load = {f"a_long_setting_{number}": 12345 for number in range(12)}
    result = Result(kind="serve", model="m", config={"load": load}, metrics={}, samples=[])
    lines = render_result(result).splitlines()[2:]
    assert len(lines) > 2
    assert max(map(len, lines)) <= 100
    assert " ".join(lines).split() == [f"{name}=12345" for name in load]
