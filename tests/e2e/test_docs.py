"""The examples of the documents run as written (the port aside)."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import Server, serving

pytestmark = [pytest.mark.model, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
USING = (ROOT / "docs/using.md").read_text()
README = (ROOT / "README.md").read_text()
QUESTION = "What is the capital of France? Answer in one short sentence."


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("docs") / "log"
    with serving(log, "--kv-cache-memory-bytes", "100MiB", "--max-model-len", "1024") as server:
        yield server


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("code", blocks(USING, "python") + blocks(README, "python")[1:])
def test_client_examples(server: Server, code: str) -> None:
    assert run([sys.executable, "-c", code.replace("http://127.0.0.1:8000", server.url)]).strip()


@pytest.mark.parametrize("code", blocks(USING, "sh"))
def test_shell_examples(server: Server, code: str) -> None:
    out = run(["sh", "-c", code.replace("http://127.0.0.1:8000", server.url)])
    assert "Paris" in out


def test_offline_example() -> None:
    # From standard input, without a main guard.
    code = blocks(README, "python")[0]
    done = subprocess.run(
        [sys.executable, "-"], input=code, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def test_run_answers_the_readme_prompt() -> None:
    assert f'scripts/demo "{QUESTION}"' in README
    arguments = ["run", "demo", "-p", QUESTION, "--temperature", "0"]
    assert run([sys.executable, "-m", "cardan", *arguments]) == "The capital of France is Paris.\n"
