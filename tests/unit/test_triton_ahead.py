"""Every Triton kernel compiles for GPUs that are not here, within what their programs share."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("triton_ahead.py")
# Backend, architecture, lanes of a warp, bytes that the threads of a program can share, features.
TARGETS = {
    "sm_80": ("cuda", "80", "32", 163 << 10),
    "sm_90": ("cuda", "90", "32", 227 << 10, "tile_copies"),
    "sm_100": ("cuda", "100", "32", 227 << 10, "tile_copies"),
    "gfx942": ("hip", "gfx942", "64", 64 << 10),
    "gfx950": ("hip", "gfx950", "64", 160 << 10),
}
EVERY_RUN = ("sm_90", "gfx942")
# Products of matrices; all other kernels do without.
WITH_PRODUCTS = {"decode_kernel", "ragged_kernel", "grouped_kernel"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in EVERY_RUN else pytest.mark.scheduled)
        for name in TARGETS
    ],
)
def test_compiles(name):
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    target = TARGETS[name]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, target)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    kernels = {item["kernel"] for item in found}
    assert len(kernels) >= 14, kernels
    for item in found:
        assert item["binary"], item
        assert item["shared"] <= target[3], item
        if item["kernel"] in WITH_PRODUCTS and item["dtype"] != "float32":
            assert item["matrix"], f"no matrix instructions: {item}"
