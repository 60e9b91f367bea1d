"""The tpu platform passes the kit, as `cardan conformance tpu` says it to its users."""

import json
import os
import subprocess
import sys

import pytest

# Of each kind one model, in every run; all of them where there is time.
SOME = "llama or not test_l5"


@pytest.mark.parametrize(
    "chosen",
    [
        f"({SOME}) and not tied and not yarn",
        pytest.param("test_", marks=[pytest.mark.scheduled, pytest.mark.timeout(900)]),
    ],
    ids=["some", "all"],
)
def test_tpu_passes(chosen, tmp_path):
    file = tmp_path / "report.json"
    command = [sys.executable, "-m", "cardan", "conformance", "tpu", "-k", chosen]
    result = subprocess.run(
        [*command, "--json", str(file)],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-8000:]
    outcomes = [test["outcome"] for test in json.loads(file.read_text())["tests"]]
    assert outcomes.count("passed") > 40
    assert "failed" not in outcomes
