"""``cardan bench`` on the command line: options, files, exit codes. Nothing is measured here."""

import asyncio
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from cardan.bench import latency, serve, startup, throughput
from cardan.bench.arrivals import Arrivals
from cardan.bench.offline import (
    Measured,
    OfflineOptions,
    Sample,
    as_prompt,
    changed_settings,
    load_requests,
    measure_repeats,
    section_settings,
)
from cardan.bench.prompts import BenchRequest
from cardan.bench.record import RequestRecord
from cardan.bench.result import Result, append_result, load_results
from cardan.bench.serve_options import ServeOptions
from cardan.bench.synthetic import SyntheticOptions
from cardan.cli.main import main
from cardan.core.config.cache import CacheConfig
from cardan.core.config.engine import EngineConfig
from cardan.core.config.model import ModelConfig
from cardan.core.observability.logging import reset_logging
from cardan.core.types.errors import ConfigError
from cardan.core.types.prompt import ChatPrompt, TextPrompt, TokenPrompt
from cardan.llm import config_from_settings

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _clean_logging():
    yield
    reset_logging()


def make_result(kind="latency", interrupted=False, samples=({"ttft_ms": 1.0},), **changes):
    return Result(
        kind=kind,
        model="demo",
        config={},
        metrics={"ttft_ms": 1.0},
        samples=[dict(sample) for sample in samples],
        interrupted=interrupted,
        **changes,
    )


@pytest.fixture
def seen(monkeypatch):
    """What the benchmarks were called with; ``seen.result`` is what they return."""

    class Seen:
        result = make_result()
        calls = ()

    def record(*arguments):
        Seen.calls = arguments
        return Seen.result

    monkeypatch.setattr(latency, "run_latency", record)
    monkeypatch.setattr(throughput, "run_throughput", record)
    monkeypatch.setattr(startup, "run_startup", record)
    monkeypatch.setattr(serve, "run_serve", record)
    return Seen


def test_latency_defaults(seen):
    assert main(["bench", "latency", "demo"]) == 0
    config, options, _report = seen.calls
    assert config == EngineConfig(model=ModelConfig(model="demo"))
    assert options == OfflineOptions(load=SyntheticOptions(count=1, input_len=128, output_len=128))


def test_latency_options(seen):
    arguments = (
        "bench latency m --load-format dummy --kv-cache-memory-bytes 1GiB --batch-size 4 "
        "--input-len 32 --output-len 16 --no-ignore-eos --load-seed 7 --warmup 0 --repeats 5 "
        "--save-records --label night --metadata a=b"
    )
    assert main(arguments.split()) == 0
    config, options, _report = seen.calls
    assert config.model.load_format == "dummy"
    assert config.cache.kv_cache_memory_bytes == 2**30
    assert options == OfflineOptions(
        load=SyntheticOptions(count=4, input_len=32, output_len=16, seed=7),
        ignore_eos=False,
        warmup=0,
        repeats=5,
        save_records=True,
        label="night",
        metadata={"a": "b"},
    )


def test_throughput_options(seen, tmp_path):
    data = tmp_path / "d.jsonl"
    arguments = (
        "bench throughput m --num-prompts 8 --input-len 9 --output-len 7 --range-ratio 0.5 "
        f"--prefix-len 100 --num-prefixes 3 --dataset custom --dataset-path {data}"
    )
    assert main(arguments.split()) == 0
    _config, options, _report = seen.calls
    assert options == OfflineOptions(
        load=SyntheticOptions(
            count=8, input_len=9, output_len=7, range_ratio=0.5, prefix_len=100, num_prefixes=3
        ),
        dataset="custom",
        dataset_path=data,
    )


def test_startup_hands_the_engine_options_to_the_server(seen, monkeypatch):
    def record(options, _report):
        seen.calls = (options, json.loads(Path(options.arguments[1]).read_text()))
        return seen.result

    monkeypatch.setattr(startup, "run_startup", record)
    arguments = (
        "bench startup m --page-cache cold --repeats 2 --timeout 9 --max-model-len auto "
        "--kv-cache-memory-bytes 1GiB --kernels a=b --no-enable-prefix-caching "
        "--log-level debug --label x"
    )
    assert main(arguments.split()) == 0
    options, file = seen.calls
    assert options.arguments[0] == "--config"
    assert not Path(options.arguments[1]).exists()
    assert file == options.settings == {
        "max_model_len": "auto",
        "kv_cache_memory_bytes": 2**30,
        "kernels": ["a=b"],
        "enable_prefix_caching": False,
    }  # fmt: skip
    assert (options.model, options.page_cache, options.repeats) == ("m", "cold", 2)
    assert (options.timeout, options.label) == (9.0, "x")


def test_serve_defaults_are_the_loads(seen):
    assert main(["bench", "serve"]) == 0
    options, _on_end = seen.calls
    assert options == ServeOptions()


def test_serve_options(seen, tmp_path):
    trace = tmp_path / "t"
    arguments = (
        "bench serve --base-url http://h:1 --model m --endpoint chat --api-key k --header A=b "
        f"--dataset sharegpt --dataset-path {trace} --num-prompts 5 --input-len 6 --output-len 7 "
        "--range-ratio 0.25 --prefix-len 8 --num-prefixes 2 --prompt-kind text --tokenizer t "
        "--vocab-size 999 --request-rate 2.5 --arrivals burst --burstiness 0.5 --burst-size 4 "
        "--ramp-to 9 --ramp-seconds 30 --max-concurrency 3 --duration 60 --seed 11 --ignore-eos "
        "--temperature 0 --goodput ttft:500 --goodput tpot:50 --percentiles 50,99.9 --warmup 0 "
        "--timeout 5 --save-records --save-text --label l --metadata x=y"
    )
    extra = ["--extra-body", '{"top_k": 1}']
    assert main([*arguments.split(), *extra]) == 0
    options, _on_end = seen.calls
    assert options == ServeOptions(
        base_url="http://h:1",
        model="m",
        endpoint="chat",
        api_key="k",
        headers={"A": "b"},
        dataset="sharegpt",
        dataset_path=trace,
        num_prompts=5,
        input_len=6,
        output_len=7,
        range_ratio=0.25,
        prefix_len=8,
        num_prefixes=2,
        prompt_kind="text",
        tokenizer="t",
        vocab_size=999,
        arrivals=Arrivals(
            rate=2.5, pattern="burst", burstiness=0.5, burst_size=4, ramp_to=9, ramp_seconds=30
        ),
        max_concurrency=3,
        duration=60,
        seed=11,
        ignore_eos=True,
        temperature=0,
        extra_body={"top_k": 1},
        goodput=("ttft:500", "tpot:50"),
        percentiles=(50.0, 99.9),
        warmup=0,
        timeout=5,
        save_records=True,
        save_text=True,
        label="l",
        metadata={"x": "y"},
    )


def test_serve_progress(seen, capsys):
    assert main(["bench", "serve", "--num-prompts", "20"]) == 0
    _options, on_end = seen.calls
    for index in range(20):
        error = "timeout" if index == 3 else None
        on_end(RequestRecord(index, 0.0, 0.0, error=error))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10
    assert "20 of 20 requests ended, 1 failed" in lines[-1]


def test_results_are_printed_saved_and_appended(seen, tmp_path, capsys):
    one, many = tmp_path / "a.json", tmp_path / "b.jsonl"
    for _ in range(2):
        arguments = ["bench", "latency", "demo", "--json", str(one), "--append", str(many)]
        assert main(arguments) == 0
    assert "latency demo" in capsys.readouterr().out
    assert load_results(one) == [seen.result]
    assert load_results(many) == [seen.result, seen.result]


@pytest.mark.parametrize("command", ["latency demo", "throughput demo", "startup demo", "serve"])
def test_an_interrupted_run_is_kept_and_exits_with_130(seen, tmp_path, capsys, command):
    seen.result = make_result(interrupted=True)
    path = tmp_path / "a.json"
    assert main(["bench", *command.split(), "--json", str(path)]) == 130
    assert "interrupted: the figures are of what was done until then" in capsys.readouterr().out
    assert load_results(path)[0].interrupted


def test_an_interrupt_keeps_finished_repeats():
    runs = iter([1.0, 2.0, 3.0])

    def run_once():
        value = next(runs)
        if value == 3.0:
            raise KeyboardInterrupt
        return Sample({"ttft_ms": value}, [])

    lines = []
    options = OfflineOptions(load=SyntheticOptions(count=1), warmup=1, repeats=5)
    measured = measure_repeats(run_once, options, lines.append)
    assert measured == Measured([Sample({"ttft_ms": 2.0}, [])], interrupted=True)
    assert lines == ["warm-up 1 of 1 done", "repeat 1 of 5: ttft_ms 2"]


def test_an_interrupt_before_the_first_repeat_says_so():
    def run_once():
        raise KeyboardInterrupt

    lines = []
    with pytest.raises(KeyboardInterrupt):
        measure_repeats(run_once, OfflineOptions(load=SyntheticOptions(count=1)), lines.append)
    assert lines == ["interrupted before the first repeat was complete: nothing was measured"]


def test_an_interrupt_while_a_run_is_set_up_is_one():
    class Runner:
        def run(self, batch):
            raise asyncio.CancelledError

    class Batches:
        def run(self):
            return None

    with pytest.raises(KeyboardInterrupt):
        latency._run_batch(Runner(), Batches())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("latency", "which model"),
        ("latency demo --repeats 0", "--repeats"),
        ("latency demo --input-len 0", "--input-len"),
        ("latency demo --imput-len 5", "did you mean --input-len"),
        ("latency demo --json /nowhere/x.json", "there is no directory /nowhere"),
        ("latency demo --metadata a", "'a' is not NAME=VALUE"),
        ("throughput demo --range-ratio 1", "range_ratio is 1.0"),
        ("throughput demo --dataset custom", "dataset_path"),
        ("throughput demo --dataset-path x", "dataset_path"),
        ("startup demo --page-cache hot", "--page-cache"),
        ("serve --goodput ttft", "goodput: 'ttft'"),
        ("serve --percentiles 50,x", "percentiles: '50,x'"),
        ("serve --percentiles 101", "percentiles: 101"),
        ("serve --request-rate 0", "request_rate is 0.0"),
        ("serve --extra-body [1]", "must be a JSON object"),
        ("compare a.json", "two files or more"),
        ("plot a.json -o out.gif", "ends in .png, .svg, .pdf"),
        ("plot a.json -o /nowhere/out.png", "there is no directory"),
        ("plot a.json", "--output"),
        ("sreve", "Did you mean 'serve'"),
    ],
)
def test_wrong_options_are_one_line(seen, capsys, arguments, message):
    assert main(["bench", *arguments.split()]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert message in lines[0]
    assert "--help" in lines[0]
    assert seen.calls == ()


def test_compare(tmp_path, capsys):
    base, other = tmp_path / "old.json", tmp_path / "new.jsonl"
    for value in (10.0, 11.0, 12.0):
        append_result(make_result(samples=[{"ttft_ms": value}]), base)
        append_result(make_result(samples=[{"ttft_ms": value / 2}], label="half"), other)
    assert main(["bench", "compare", str(base), str(other)]) == 0
    header, row = capsys.readouterr().out.splitlines()
    assert header.split()[:2] == ["old", "half"]
    assert row.endswith("better")
    assert main(["bench", "compare", str(base), str(base)]) == 0
    assert capsys.readouterr().out.split()[:2] == [str(base)] * 2


def test_compare_of_different_things(tmp_path, capsys):
    base, other = tmp_path / "a.json", tmp_path / "b.json"
    append_result(make_result(), base)
    append_result(make_result(device={"name": "x"}), other)
    assert main(["bench", "compare", str(base), str(other)]) == 1
    assert "device.name is None and 'x'" in capsys.readouterr().err
    assert main(["bench", "compare", str(base), str(other), "--force"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("different: device.name is None and 'x'\n")
    assert "too few repeats" in out


def test_help_needs_neither_torch_nor_numpy():
    code = (
        "import sys; sys.modules.update(torch=None, numpy=None, aiohttp=None, matplotlib=None)\n"
        "from cardan.cli.main import main\n"
        "for command in ([], ['latency'], ['throughput'], ['serve'], ['startup'], ['compare'],"
        " ['plot']): assert main(['bench', *command, '--help']) == 0"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "--request-rate" in done.stdout


# -- what the offline benchmarks make of their options ------------------------------------------


def test_only_changed_settings_are_kept_and_reach_the_engine():
    config = EngineConfig(
        model=ModelConfig(model="m", load_format="dummy"),
        cache=CacheConfig(kv_cache_memory_bytes=100),
    )
    assert changed_settings(config) == {
        "model": {"load_format": "dummy"},
        "cache": {"kv_cache_memory_bytes": 100},
    }
    assert config_from_settings("m", section_settings(config)) == config


class Letters:
    """A tokenizer with one token for each letter."""

    def encode(self, text):
        return list(text.encode())


def test_requests_of_a_dataset(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text('{"prompt": "abc", "max_tokens": 4}\n{"prompt": [1, 2], "max_tokens": 5}\n')
    load = SyntheticOptions(count=2)
    options = OfflineOptions(load=load, dataset="custom", dataset_path=path)
    requests = load_requests(options, 100, Letters())
    assert [as_prompt(request) for request in requests] == [
        TextPrompt(text="abc"),
        TokenPrompt(token_ids=(1, 2)),
    ]
    more = OfflineOptions(load=SyntheticOptions(count=3), dataset="custom", dataset_path=path)
    with pytest.raises(ConfigError, match=r"has 2 requests, 3 are asked for; .*--num-prompts 2"):
        load_requests(more, 100, Letters())


def test_sharegpt_answers_are_counted_in_tokens(tmp_path):
    path = tmp_path / "d.json"
    turns = [{"from": "human", "value": "question"}, {"from": "gpt", "value": "answer"}]
    path.write_text(json.dumps([{"conversations": turns}]))
    options = OfflineOptions(load=SyntheticOptions(count=1), dataset="sharegpt", dataset_path=path)
    [request] = load_requests(options, 100, Letters())
    assert request.max_tokens == 6


def test_random_requests_have_ids_of_the_model():
    options = OfflineOptions(load=SyntheticOptions(count=3, input_len=50, output_len=4))
    requests = load_requests(options, 64, Letters())
    assert all(0 <= item < 64 for request in requests for item in request.token_ids)
    assert [len(request.token_ids) for request in requests] == [50] * 3


def test_conversations_are_chats():
    message = {"role": "user", "content": "Hi"}
    prompt = as_prompt(BenchRequest(messages=(message,), max_tokens=1))
    assert prompt == ChatPrompt(messages=(message,))


# -- figures of one repeat ----------------------------------------------------------------------


def test_latency_figures_by_hand():
    records = [
        RequestRecord(0, 0.0, 0.0, 1.0, [1.0, 1.5, 2.0], [1, 1, 1], 2.0, 5, 3),
        RequestRecord(1, 0.0, 0.0, 2.0, [2.0, 3.0, 4.0], [1, 1, 1], 4.0, 5, 3),
    ]
    found = latency.latency_figures(records)
    assert found["ttft_ms"] == 1500
    assert found["e2el_ms"] == 3000
    assert found["tpot_ms"] == 750
    assert found["itl_p50_ms"] == 750
    assert found["output_tokens_per_s"] == 6 / 4
    assert found["decode_tokens_per_s"] == pytest.approx(4 / 3)


def test_latency_of_single_tokens_has_no_gaps():
    found = latency.latency_figures([RequestRecord(0, 0.0, 0.0, 1.0, [1.0], [1], 1.0, 5, 1)])
    assert set(found) == {"ttft_ms", "e2el_ms", "output_tokens_per_s"}
    assert math.isclose(found["ttft_ms"], 1000)
