"""The examples of docs/benchmarking.md run as written (the port aside), in order."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from server_process import serving

pytestmark = [pytest.mark.model, pytest.mark.slow]

DOCUMENT = (Path(__file__).parents[2] / "docs/benchmarking.md").read_text()


@pytest.mark.timeout(600)
def test_examples(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    pytest.importorskip("matplotlib")
    examples = re.findall(r"```sh\n(.*?)```", DOCUMENT, re.DOTALL)
    assert len(examples) == 5
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    size = ("--kv-cache-memory-bytes", "100MiB", "--max-model-len", "1024")
    with serving(tmp_path / "log", *size) as server:
        for example in examples:
            done = subprocess.run(
                ["sh", "-e", "-c", example.replace("http://127.0.0.1:8000", server.url)],
                cwd=tmp_path,
                env=env,
                capture_output=True,
                text=True,
                timeout=200,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            assert done.stdout.strip()
    assert {path.name for path in tmp_path.iterdir()} == {
        "log", "old.jsonl", "new.jsonl", "serve.json", "serve.png",
    }  # fmt: skip


def test_every_figure_is_explained() -> None:
    """The table of figures names what the benchmarks report."""
    for name in (
        "ttft_ms", "tpot_ms", "itl_ms", "e2el_ms", "from_sent", "send_delay_ms", "requests_per_s",
        "output_tokens_per_s", "total_tokens_per_s", "decode_tokens_per_s", "prefix_hit_rate",
        "goodput", "generator_lag_ms", "ready_s", "first_token_s", "startup_s", "peak_rss_bytes",
    ):  # fmt: skip
        assert f"`{name}" in DOCUMENT, name
