"""The offline benchmarks on the demo model, as a user runs them; no figure is judged."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from cardan.bench.process_memory import tree_memory
from cardan.bench.record import RequestRecord
from cardan.bench.result import load_results
from cardan.bench.startup import prepare_page_cache, weight_files
from cardan.core.weights.resolve import resolve_model

pytestmark = [pytest.mark.model, pytest.mark.slow]

SMALL = ["demo", "--kv-cache-memory-bytes", "100MiB", "--max-model-len", "1024"]
SPREAD = {"count", "mean", "std", "min", "median", "max"}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "cardan", "bench", *arguments]


def bench(*arguments: str) -> subprocess.CompletedProcess:
    done = subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


def test_latency(tmp_path: Path) -> None:
    path = tmp_path / "latency.json"
    arguments = ["--input-len", "32", "--output-len", "8", "--repeats", "2", "--batch-size", "2"]
    done = bench("latency", *SMALL, *arguments, "--save-records", "--json", str(path))
    assert "latency demo on cpu" in done.stdout
    assert "repeat 2 of 2" in done.stderr
    [result] = load_results(path)
    assert set(result.metrics) == {
        "ttft_ms", "tpot_ms", "itl_p50_ms", "itl_p99_ms", "e2el_ms", "output_tokens_per_s",
        "decode_tokens_per_s", "startup_s", "peak_rss_bytes",
    }  # fmt: skip
    assert set(result.metrics["ttft_ms"]) == SPREAD
    assert len(result.samples) == 2
    assert result.config["load"]["input_len"] == 32
    assert result.config["engine"]["cache"] == {"kv_cache_memory_bytes": 100 << 20}
    records = [RequestRecord(**item) for item in result.records]
    assert [item.index for item in records] == [0, 1, 2, 3]
    assert records[0].due == 0.0
    for item in records:
        assert (item.prompt_tokens, item.output_tokens) == (32, 8)
        assert sum(item.chunk_tokens) == 8
        assert item.due <= item.sent <= item.first_token <= item.end
        assert item.token_times == sorted(item.token_times)


def test_throughput_with_a_shared_prefix(tmp_path: Path) -> None:
    path = tmp_path / "all.jsonl"
    load = ["--num-prompts", "4", "--input-len", "16", "--output-len", "4", "--prefix-len", "128"]
    # One prompt a step: the others find the prefix of the first one computed.
    settings = ["--max-num-batched-tokens", "144", "--repeats", "2", "--warmup", "0"]
    bench("throughput", *SMALL, *load, *settings, "--append", str(path))
    [result] = load_results(path)
    for sample in result.samples:
        # Three prompts of 144 tokens find 128.
        assert sample["prefix_hit_rate"] == 3 * 128 / (4 * 144)
        assert sample["output_tokens_per_s"] == pytest.approx(16 / sample["duration_s"])
        assert sample["total_tokens_per_s"] == pytest.approx(592 / sample["duration_s"])
    out = bench("compare", str(path), str(path)).stdout
    assert "output_tokens_per_s" in out
    assert "too few repeats" in out


def test_startup(tmp_path: Path) -> None:
    path = tmp_path / "startup.json"
    bench("startup", *SMALL, "--repeats", "1", "--page-cache", "as-is", "--json", str(path))
    [result] = load_results(path)
    [sample] = result.samples
    assert 0 < sample["startup_s.total"] < sample["ready_s"] < sample["first_token_s"]
    assert sample["processes"] == 2  # the server and its engine
    assert 0 < sample["rss_bytes"] <= sample["peak_rss_bytes"]
    assert result.config["engine"] == {"kv_cache_memory_bytes": 100 << 20, "max_model_len": 1024}


def test_startup_of_a_server_that_cannot_start() -> None:
    arguments = ["demo", "--repeats", "1", "--page-cache", "as-is", "--max-model-len", "900000"]
    done = subprocess.run(
        command("startup", *arguments), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert "cardan serve ended with code 1" in done.stderr
    assert "900000" in done.stderr
    assert "Traceback" not in done.stderr


def test_interrupt_prints_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    arguments = ["--input-len", "8", "--output-len", "4", "--repeats", "100000"]
    process = subprocess.Popen(
        command("latency", *SMALL, *arguments, "--json", str(path)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for line in process.stderr:
        if line.startswith("repeat 2 "):
            process.send_signal(signal.SIGINT)
            break
    out, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    assert "Traceback" not in error
    assert "interrupted: the figures are of what was done until then" in out
    values = json.loads(path.read_text())
    assert values["interrupted"]
    assert len(values["samples"]) >= 2


def test_tree_memory_agrees_with_psutil() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1); input()'])"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        process.stdout.readline()
        parent = psutil.Process(process.pid)
        family = [parent, *parent.children(recursive=True)]
        expected = sum(item.memory_info().rss for item in family)
        found = tree_memory(process.pid)
        assert found.processes == len(family) == 2
        assert found.rss == pytest.approx(expected, rel=0.02)
        assert found.peak_rss >= found.rss
    finally:
        process.communicate(b"\n")
    assert tree_memory(process.pid) is None


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="no page cache control here")
def test_the_weights_are_the_models() -> None:
    files = weight_files(resolve_model("demo"))
    assert [path.suffix for path in files] == [".gguf"]
    before = files[0].stat()
    for state in ("warm", "cold", "as-is"):
        prepare_page_cache(files, state)
    assert files[0].stat().st_mtime == before.st_mtime
