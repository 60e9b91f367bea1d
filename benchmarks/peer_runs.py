"""One run of one engine on one scenario, for `cpu_peers.py`; each gives its figures by name.

Names: ``decode_tok_s``, ``ttft_ms``, ``output_tok_s``, ``requests_s``, ``gap_p99_ms``,
``start_s``, ``peak_rss_mb``.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from cardan.bench.process_memory import tree_memory
from cardan.platforms.cpu.cpu_info import cpu_name

Figures = dict[str, float]
HERE = Path(__file__).parent
CARDAN_SETTINGS = {
    "q4_1": (),
    "bf16": ("--dtype", "bfloat16", "--quantization", "none"),
}
THREADS = "2"
SERVE_LOAD = (
    "--num-prompts", "64", "--max-concurrency", "16", "--input-len", "200", "--range-ratio",
    "0.25", "--output-len", "64", "--ignore-eos", "--warmup", "2",
)  # fmt: skip
START_WAIT_S = 240
_NO_SETTINGS: Mapping[str, str] = {}
# Both cores, as the others have them; its default keeps one free.
_VLLM_ENV = {
    "OMP_NUM_THREADS": THREADS,
    "VLLM_CPU_OMP_THREADS_BIND": "0-1",
    "VLLM_CPU_KVCACHE_SPACE": "2",
}


def device_name() -> str:
    return f"{cpu_name(Path('/'))}, {os.cpu_count()} CPUs"


def model_file(model: str) -> Path | None:
    """The GGUF file that cardan takes ``model`` to be."""
    from cardan.core.weights.resolve import resolve_model

    return resolve_model(model, None).gguf


def cardan(model: str, settings: Sequence[str]) -> dict[str, Callable[[], Figures]]:
    server = [sys.executable, "-m", "cardan", "serve", model, *settings]
    server += ["--max-model-len", "2048", "--kv-cache-memory-bytes", "1GiB"]
    return {
        **{name: partial(_cardan_offline, model, settings, name) for name in "ABD"},
        "C": partial(_served, server, "--port"),
        "start": partial(_start, server, "--port"),
    }


def llama_cpp(folder: Path, model: Path) -> dict[str, Callable[[], Figures]]:
    server = [str(folder / "llama-server"), "-m", str(model), "-t", THREADS, "-tb", THREADS]
    many = [*server, "-np", "32", "-c", "20480"]
    return {
        "A": partial(_llama_bench, folder, model),
        "B": partial(_llama_batched, folder, model, ["-npp", "256", "-ntg", "128"]),
        # The shared prompt is read once, and nobody has tokens of their own.
        "D": partial(_llama_batched, folder, model, ["-npp", "512", "-ntg", "32", "-pps"]),
        "C": partial(_served, many, "--port"),
        "start": partial(_start, server, "--port"),
    }


def openvino(python: Path, model: Path) -> dict[str, Callable[[], Figures]]:
    def run(scenario: str) -> Figures:
        return _scripted(
            [str(python), str(HERE / "openvino_run.py"), str(model), scenario, THREADS]
        )

    return {name: partial(run, name) for name in ("A", "B", "D", "start")}


def vllm(python: Path, model: Path) -> dict[str, Callable[[], Figures]]:
    """``model``: a folder as Hugging Face has them, for its GGUF reader lacks the architecture."""

    def run(scenario: str) -> Figures:
        # Without this folder on its path: it imports a package that is called as a file here.
        command = [str(python), "-P", str(HERE / "vllm_run.py"), str(model), scenario]
        return _scripted(command, _VLLM_ENV)

    # Its wheel for CPUs has no working command of its own.
    server = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    server += ["--dtype", "bfloat16", "--max-model-len", "2048", "--gpu-memory-utilization", "0.3"]
    return {
        **{name: partial(run, name) for name in ("A", "B", "D", "start")},
        "C": partial(_served, server, "--port", _VLLM_ENV),
    }


# -- offline runs ----------------------------------------------------------------------------------


def _scripted(command: Sequence[str], settings: Mapping[str, str] = _NO_SETTINGS) -> Figures:
    """What a script of a peer prints; of a start, the time from here to its first token."""
    began = time.monotonic()
    lines, peak = _run_measured(command, settings)
    # A peer may write logs beside it.
    figures: Figures = json.loads([line for line in lines if line.startswith("{")][-1])
    if "first_token_at" in figures:
        figures = {"start_s": figures["first_token_at"] - began}
    return {**figures, "peak_rss_mb": peak}


def _cardan_offline(model: str, settings: Sequence[str], scenario: str) -> Figures:
    command = [sys.executable, str(HERE / "throughput.py"), "--scenario", scenario]
    command += ["--model", model, "--repeats", "1", *settings]
    lines, peak = _run_measured(command)
    metrics = json.loads(lines[-1])["metrics"]
    if scenario == "A":
        return {
            "decode_tok_s": metrics["decode_tokens_per_s"]["mean"],
            "ttft_ms": metrics["ttft_ms"]["mean"],
            "peak_rss_mb": peak,
        }
    return {"output_tok_s": metrics["output_tokens_per_s"]["mean"], "peak_rss_mb": peak}


def _llama_bench(folder: Path, model: Path) -> Figures:
    command = [str(folder / "llama-bench"), "-m", str(model), "-t", THREADS]
    lines, peak = _run_measured([*command, "-p", "128", "-n", "256", "-r", "1", "-o", "jsonl"])
    runs = [json.loads(line) for line in lines if line.startswith("{")]
    rate = {bool(run["n_prompt"]): run["avg_ts"] for run in runs}
    return {
        "decode_tok_s": rate[False],
        # Its first token comes with the prompt's last logits.
        "ttft_ms": 128_000 / rate[True],
        "peak_rss_mb": peak,
    }


def _llama_batched(folder: Path, model: Path, load: Sequence[str]) -> Figures:
    command = [str(folder / "llama-batched-bench"), "-m", str(model), "-t", THREADS]
    command += ["-tb", THREADS, "-c", "20480", "-npl", "32", "--output-format", "jsonl", *load]
    lines, peak = _run_measured(command)
    run = json.loads(next(line for line in reversed(lines) if line.startswith("{")))
    return {"output_tok_s": run["pl"] * run["tg"] / run["t"], "peak_rss_mb": peak}


def _run_measured(
    command: Sequence[str], settings: Mapping[str, str] = _NO_SETTINGS
) -> tuple[list[str], float]:
    """Lines of stdout, and the largest resident size seen, MB, of the process and its children."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**_env(), **settings},
    )
    watch = _PeakMemory(process.pid)
    output, _ = process.communicate()
    peak = watch.stop()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with status {process.returncode}")
    return output.splitlines(), peak


# -- served runs -----------------------------------------------------------------------------------


def _served(
    server: Sequence[str], port_option: str, settings: Mapping[str, str] = _NO_SETTINGS
) -> Figures:
    with _serving([*server, port_option], settings) as (url, process):
        watch = _PeakMemory(process.pid)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "result.json")
            command = [sys.executable, "-m", "cardan", "bench", "serve", "--base-url", url]
            subprocess.run(
                [*command, *SERVE_LOAD, "--json", str(path)],
                check=True,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            metrics = json.loads(path.read_text())["metrics"]
        peak = watch.stop()
    return {
        "requests_s": metrics["requests_per_s"],
        "output_tok_s": metrics["output_tokens_per_s"],
        "ttft_ms": metrics["ttft_ms"]["p50"],
        "gap_p99_ms": metrics["itl_ms"]["p99"],
        "peak_rss_mb": peak,
    }


def _start(server: Sequence[str], port_option: str) -> Figures:
    began = time.monotonic()
    with _serving([*server, port_option]) as (url, process):
        body = {"prompt": [5, 6, 7], "max_tokens": 1, "stream": True}
        request = urllib.request.Request(
            url + "/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.readline()
        taken = time.monotonic() - began
        peak = _PeakMemory(process.pid).stop()
    return {"start_s": taken, "peak_rss_mb": peak}


@contextlib.contextmanager
def _serving(
    command: Sequence[str], settings: Mapping[str, str] = _NO_SETTINGS
) -> Iterator[tuple[str, subprocess.Popen]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [*command, str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**_env(), **settings},
    )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_ready(url, process)
        yield url, process
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=30)


def _wait_ready(url: str, process: subprocess.Popen) -> None:
    until = time.monotonic() + START_WAIT_S
    while time.monotonic() < until:
        if process.poll() is not None:
            raise RuntimeError(f"{process.args} ended with status {process.returncode}")
        with contextlib.suppress(OSError), urllib.request.urlopen(url + "/health", timeout=5):
            return
        time.sleep(0.01)
    raise RuntimeError(f"{process.args} was not ready within {START_WAIT_S} s")


class _PeakMemory:
    """Watches the resident memory of a process and its children until told to stop."""

    def __init__(self, pid: int) -> None:
        self._pid, self._peak, self._stopped = pid, 0.0, threading.Event()
        self._look()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> float:
        self._stopped.set()
        self._thread.join()
        return self._peak

    def _watch(self) -> None:
        while not self._stopped.wait(0.1):
            self._look()

    def _look(self) -> None:
        use = tree_memory(self._pid)
        if use is not None:
            self._peak = max(self._peak, use.rss / 1e6)


def _env() -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1"}
