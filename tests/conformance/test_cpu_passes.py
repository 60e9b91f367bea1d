"""The CPU platform passes the kit, as `cardan conformance cpu` says it to its users."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("levels", ["L0,L1,L2,L3", "L4", "L5"])
def test_cpu_passes(levels, tmp_path):
    file = tmp_path / "report.json"
    command = [sys.executable, "-m", "cardan", "conformance", "cpu", "--level", levels]
    result = subprocess.run(
        [*command, "--json", str(file)],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=290,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-8000:]
    outcomes = [test["outcome"] for test in json.loads(file.read_text())["tests"]]
    assert outcomes.count("passed") > 30
    assert "failed" not in outcomes
