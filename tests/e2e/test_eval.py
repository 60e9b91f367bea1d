"""``cardan eval`` on the demo model, as a user runs it; transformers has the same weights."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cardan.eval.text import read_text
from cardan.eval.windows import WindowOptions, cut_windows

pytestmark = [pytest.mark.model, pytest.mark.slow]

WINDOWS = WindowOptions(context=128, stride=64, max_tokens=320)
SMALL = ("--context", "128", "--stride", "64", "--max-tokens", "320")


def evaluate(path: Path, *arguments: str) -> tuple[dict, str]:
    done = subprocess.run(
        [sys.executable, "-m", "cardan", "eval", *arguments, *SMALL, "--json", str(path)],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text()), done.stdout


@pytest.fixture(scope="module")
def truth(hf) -> dict[str, float]:
    """Figures of the shipped text's first tokens by transformers in float32."""
    ids = hf.tokenizer(read_text(None).content)["input_ids"]
    nll, num_bytes = [], 0
    for window in cut_windows(ids, WINDOWS, None):
        table = hf.logprobs(list(window.token_ids))[window.first - 1 : -1]
        targets = torch.tensor(window.scored)
        nll.append(-table.gather(1, targets[:, None])[:, 0])
        num_bytes += len(hf.tokenizer.decode(window.scored).encode())
    values = torch.cat(nll)
    return {
        "tokens": len(values),
        "perplexity": math.exp(values.mean()),
        "mean_nll_se": values.std().item() / len(values) ** 0.5,
        "bits_per_byte": values.sum().item() / math.log(2) / num_bytes,
    }


def test_perplexity_equals_transformers(truth: dict[str, float], tmp_path: Path) -> None:
    path = tmp_path / "perplexity.json"
    exact = ("--dtype", "float32", "--quantization", "none")
    result, out = evaluate(path, "perplexity", "demo", *exact)
    assert truth["tokens"] == 256
    for name, value in truth.items():
        assert result["metrics"][name] == pytest.approx(value, rel=1e-3), name
    assert "perplexity demo on cpu" in out
    assert "bits_per_byte" in out


def test_kl_of_a_shorter_dtype(truth: dict[str, float], tmp_path: Path) -> None:
    path = tmp_path / "kl.json"
    short = ("--dtype", "bfloat16", "--quantization", "none")
    exact = ("--against-dtype", "float32", "--against-quantization", "none")
    metrics = evaluate(path, "kl", "demo", *short, *exact)[0]["metrics"]
    assert metrics["against"]["perplexity"] == pytest.approx(truth["perplexity"], rel=1e-3)
    assert metrics["model"]["perplexity"] == pytest.approx(truth["perplexity"], rel=0.02)
    assert 1e-5 < metrics["kl"]["mean"] < 0.01
    assert metrics["kl"]["median"] <= metrics["kl"]["p90"] <= metrics["kl"]["max"]
    assert metrics["same_top_token_fraction"] > 0.95
    ratio = metrics["model"]["perplexity"] / metrics["against"]["perplexity"]
    assert math.exp(metrics["nll_increase"]) == pytest.approx(ratio, rel=1e-9)
