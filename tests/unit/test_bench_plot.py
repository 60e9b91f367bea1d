"""Plots: what is drawn is what the records say."""

import sys
from dataclasses import asdict

import pytest

from cardan.bench.plot import draw_cdf, draw_throughput, draw_timeline, plot_results, token_arrivals
from cardan.bench.record import RequestRecord
from cardan.bench.result import Result
from cardan.core.types.errors import ConfigError

matplotlib_figure = pytest.importorskip("matplotlib.figure")

STREAMED = RequestRecord(0, 0.0, 0.5, 1.0, [1.0, 1.5, 2.0], [1, 2, 1], 2.0, 5, 4)
REFUSED = RequestRecord(1, 0.25, 0.75, end=1.25, error="HTTP 503: full", status=503)
WHOLE = RequestRecord(2, 0.0, 0.0, 1.0, end=4.0, output_tokens=6)


@pytest.fixture
def axes():
    return matplotlib_figure.Figure().add_subplot()


def result(records, **changes):
    return Result(
        kind="serve",
        model="demo",
        config={},
        metrics={},
        samples=[],
        records=None if records is None else [asdict(record) for record in records],
        date="2026-01-01T00:00:00+00:00",
        **changes,
    )


@pytest.mark.parametrize(("suffix", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_a_picture_is_written(tmp_path, suffix, magic):
    path = tmp_path / f"out.{suffix}"
    runs = [result([STREAMED, REFUSED, WHOLE]), result([STREAMED])]
    plot_results(runs, ["first", "second"], path)
    assert path.read_bytes().startswith(magic)


def test_timeline_has_the_phases(axes):
    draw_timeline(axes, [STREAMED, REFUSED], "x")
    waiting, prefill, decode = (
        [tuple(path.vertices[:, 0]) for path in lines.get_paths()] for lines in axes.collections
    )
    assert waiting == [(0.0, 0.5), (0.25, 0.75)]
    assert prefill == [(0.5, 1.0), (0.75, 1.25)]
    assert decode == [(1.0, 2.0), (1.25, 1.25)]
    [failed] = axes.lines
    assert list(failed.get_xdata()) == [1.25]
    assert list(failed.get_ydata()) == [1]


def test_cdf_is_the_share_of_values_up_to_x(axes):
    draw_cdf(axes, [3.0, 1.0, 2.0, 2.0], "x")
    [line] = axes.lines
    assert list(line.get_xdata()) == [1.0, 1.0, 2.0, 2.0, 3.0]
    assert list(line.get_ydata()) == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_cdf_of_nothing_draws_nothing(axes):
    draw_cdf(axes, [], "x")
    assert not axes.lines


def test_throughput_adds_up_to_all_tokens(axes):
    records = [
        RequestRecord(0, 0.0, 0.0, 0.1, [0.1 * i for i in range(1, 101)], [2] * 100, 10.0, 1, 200)
    ]
    draw_throughput(axes, records, "x")
    [line] = axes.lines
    x, y = line.get_xdata(), line.get_ydata()
    assert x[-1] == 10.0
    assert sum((x[1:] - x[:-1]) * y[:-1]) == pytest.approx(200)


def test_tokens_without_times_come_at_the_end():
    assert token_arrivals([STREAMED, WHOLE]) == ([1.0, 1.5, 2.0, 4.0], [1, 2, 1, 6])


def test_throughput_of_an_instant_draws_nothing(axes):
    draw_throughput(axes, [RequestRecord(0, 0.0, 0.0)], "x")
    assert not axes.lines


def test_records_are_needed(tmp_path):
    with pytest.raises(ConfigError, match=r"serve result night has no records.*--save-records"):
        plot_results([result(None, label="night")], ["x"], tmp_path / "a.png")
    with pytest.raises(ConfigError, match="2026-01-01"):
        plot_results([result([])], ["x"], tmp_path / "a.png")


def test_other_suffixes(tmp_path):
    with pytest.raises(ConfigError, match=r"ends in \.png, \.svg, \.pdf"):
        plot_results([result([STREAMED])], ["x"], tmp_path / "a.gif")


def test_unwritable(tmp_path):
    with pytest.raises(ConfigError, match="cannot be written"):
        plot_results([result([STREAMED])], ["x"], tmp_path / "none" / "a.png")


def test_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'cardan\[bench\]'"):
        plot_results([result([STREAMED])], ["x"], tmp_path / "a.png")
