"""The benchmark scripts run and print JSON lines with what a figure needs to be kept."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def lines_of(script: str, *arguments: str) -> list[dict]:
    result = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *arguments],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_step_host_time() -> None:
    [line] = lines_of("step_host_time.py", "--rows", "8", "--repeats", "1")
    assert line["rows"] == 8
    assert line["commit"]
    assert line["steady_us"]["median"] > 0
    assert 0 < line["busy"]["median"] <= 1


def test_kernels() -> None:
    lines = lines_of("kernels.py", "--platform", "cpu", "--op", "rms_norm", "--dtype", "float32")
    assert {line["op"] for line in lines} == {"rms_norm"}
    assert {line["provider"] for line in lines} >= {"reference", "cpu.rms_norm"}
    assert all(line["commit"] for line in lines)


def test_gpu() -> None:
    """Its rows of speed and its soak, on the platform that is here."""
    lines = lines_of(
        "gpu.py",
        *("--platform", "cpu", "--shapes", "tiny", "--repeats", "1", "--minutes", "0.08"),
        *("--only", "decode,long,prefill,throughput,busy,soak"),
        *("--set", "num_blocks=40", "max_model_len=512", "block_size=16"),
    )
    rows = {line["row"]: line for line in lines}
    assert not [line for line in lines if "error" in line or line.get("failures")]
    for name in ("decode, batch 4", "decode, 2 x 256", "prefill 2 x 128"):
        assert rows[f"tiny {name}"]["figure"] > 0
    assert "skipped" in rows["tiny busy, batch 4"]
    assert rows["soak"]["preemptions"] > 0
    assert rows["soak answers alone"]["cases"] > 0


@pytest.mark.model
def test_quality() -> None:
    small = ("--context", "32", "--max-tokens", "64", "--quantization", "none")
    same, short = lines_of("quality.py", *small, "--dtype", "float32", "bfloat16")
    assert (same["label"], short["label"]) == ("float32 none auto", "bfloat16 none auto")
    assert same["commit"]
    assert same["metrics"]["kl"]["max"] == 0
    assert 0 < short["metrics"]["kl"]["mean"] < 0.1
    assert short["config"]["against"]["dtype"] == "float32"
