"""The demo model on a machine without a C compiler: numba's kernels where it is installed, else
torch, and the words for either."""

import os
import subprocess
import sys

import pytest

from cardan.platforms.cpu.numba.availability import is_installed

pytestmark = [pytest.mark.model, pytest.mark.slow]

SCRIPT = """
import sys
if sys.argv[1] == "torch":
    sys.modules["numba"] = None
from cardan import LLM, SamplingParams
# Whatever this machine prefers: in bfloat16 kernels round differently, and texts may.
with LLM("demo", dtype="float32") as llm:
    text = "The capital of France is"
    (answer,) = llm.generate([text], SamplingParams(temperature=0.0, max_tokens=12))
    print(answer.outputs[0].text)
"""


def run(tmp_path, with_what, arguments):
    environment = {
        **os.environ,
        "CC": "/no/such/compiler",
        "XDG_CACHE_HOME": str(tmp_path),
        "HF_HUB_OFFLINE": "1",
    }
    environment.pop("NUMBA_CACHE_DIR", None)
    done = subprocess.run(
        [sys.executable, *arguments, with_what],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done


@pytest.fixture(scope="module")
def torch_text(tmp_path_factory):
    done = run(tmp_path_factory.mktemp("cache"), "torch", ["-c", SCRIPT])
    assert done.stderr.count("runs without native kernels") == 1
    assert "no C compiler: CC=/no/such/compiler is not on PATH" in done.stderr
    assert "torch's operations serve, several times slower" in done.stderr
    assert "pip install 'cardan[numba]'" in done.stderr
    return done.stdout


def test_torch_serves(torch_text):
    assert "Paris" in torch_text


@pytest.mark.skipif(not is_installed(), reason="numba is not installed")
def test_numba_serves_and_keeps_its_kernels(tmp_path, torch_text):
    first = run(tmp_path, "numba", ["-c", SCRIPT])
    assert first.stdout == torch_text
    assert first.stderr.count("runs without native kernels") == 1
    assert "kernels compiled by numba" in first.stderr
    assert first.stderr.count("numba compiles kernels for this CPU") == 1
    assert list((tmp_path / "cardan" / "numba").rglob("*.nbi"))
    second = run(tmp_path, "numba", ["-c", SCRIPT])
    assert second.stdout == torch_text
    assert "numba compiles" not in second.stderr
