"""Rows of a start: a new process to its first token, with kernels compiled anew and kept."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gpu_rows.engine import write_model
from gpu_rows.rows import process_error

# Where kernels, programs and what drivers make of them are kept.
_CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH", "XDG_CACHE_HOME")
_LONGEST_S = 600.0


def run_start_rows(rows, name, shape, settings):
    """Two rows: with a cache folder that nothing is in, and again with what that start left."""
    with tempfile.TemporaryDirectory() as folder:
        model, caches = Path(folder) / "model", Path(folder) / "caches"
        model.mkdir()
        write_model(shape, model)
        for state in ("cold", "cached"):
            rows.run(
                f"{name} new process to first token, kernels {state}",
                lambda: start(model, settings, caches, rows.left_s()),
            )


def start(model, settings, caches, left_s):
    environment = {**os.environ, **{name: str(caches / name) for name in _CACHES}}
    command = [sys.executable, "-P", str(Path(__file__).with_name("first_token.py"))]
    began = time.monotonic()
    child = subprocess.run(
        [*command, str(model), json.dumps(settings)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=min(_LONGEST_S, left_s or _LONGEST_S),
        check=False,
    )
    if child.returncode:
        raise process_error(child.returncode, child.stderr)
    said = json.loads(child.stdout.splitlines()[-1])
    return {
        "unit": "s",
        "figure": round(said["first_token"] - began, 2),
        "python": round(said["began"] - began, 2),
        "imports": round(said["imported"] - said["began"], 2),
        "engine": round(said["ready"] - said["imported"], 2),
        "first_token": round(said["first_token"] - said["ready"], 2),
        "phases": {phase: round(seconds, 2) for phase, seconds in said["phases"].items()},
    }
