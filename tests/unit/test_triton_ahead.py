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
    "sm_90": ("cuda", "90", "32", 227 << 10, "tile_copies", "dependent_launches"),
    "sm_100": ("cuda", "100", "32", 227 << 10, "tile_copies", "dependent_launches"),
    "gfx90a": ("hip", "gfx90a", "64", 64 << 10),
    "gfx942": ("hip", "gfx942", "64", 64 << 10),
    "gfx950": ("hip", "gfx950", "64", 160 << 10),
    "gfx1100": ("hip", "gfx1100", "32", 64 << 10),
    "gfx1201": ("hip", "gfx1201", "32", 64 << 10),
}
# What runs each time: the layers of common models, on one of each kind.
EVERY_RUN = ("sm_90", "gfx942", "gfx1201")
# Kernels of decode steps, which begin before the one before them ends.
OVERLAPPING = {
    *("gemv_kernel", "skinny_kernel", "add_shares_kernel", "decode_kernel"),
    *("rms_norm_kernel", "add_rms_norm_kernel", "rotate_kernel", "rotate_and_write_kernel"),
    *("silu_and_mul_kernel", "gelu_tanh_and_mul_kernel"),
}
# Products of matrices; all other kernels do without.
WITH_PRODUCTS = {
    *("skinny_kernel", "decode_kernel", "ragged_kernel", "prefill_kernel", "grouped_kernel"),
}
# Their instructions, by what the names of architectures begin with.
MATRIX_WORDS = {
    **dict.fromkeys(("gfx90a", "gfx942", "gfx950"), "v_mfma"),
    **dict.fromkeys(("gfx1100", "gfx1201"), "v_wmma"),
}
# Architectures whose caches may be float8, and those for which the compiler converts it by
# instructions; gfx942's know another form.
FLOAT8, CONVERTING = {"gfx942", "gfx950", "gfx1201"}, {"gfx950"}
# Kernels whose registers are just enough on this architecture: a little more would be on the stack.
FULL, FULL_ON = {"prefill_kernel", "gather_kernel"}, "sm_90"


def compiled(portion, name):
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), portion, *map(str, TARGETS[name])],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "portion"),
    [(name, "few") for name in EVERY_RUN]
    + [pytest.param(name, "all", marks=pytest.mark.scheduled) for name in TARGETS],
)
def test_compiles(name, portion):
    found = compiled(portion, name)
    kernels = {item["kernel"] for item in found}
    assert len(kernels) >= 14, kernels
    overlapping = {item["kernel"] for item in found if item["waits"] is not None}
    if "dependent_launches" in TARGETS[name]:
        assert overlapping >= OVERLAPPING
    else:
        assert not overlapping
    for item in found:
        assert item["binary"], item
        assert item["waits"] is not False, f"touches memory before it waits: {item}"
        assert item["shared"] <= TARGETS[name][3], item
        if item["kernel"] in WITH_PRODUCTS and item["dtype"] != "float32":
            assert item["matrix"], f"no matrix instructions: {item}"
            assert MATRIX_WORDS.get(name, item["matrix"][0]) in item["matrix"], item
        if name == FULL_ON and item["kernel"] in FULL and item["dtype"] != "float32":
            assert not item["stack"], item
    if name in MATRIX_WORDS:
        check_waves(name, portion, found)
        check_float8(name, found)


def check_waves(name, portion, found):
    """Registers of common layers do not go to memory, nor, on GPUs with the more of them, next to
    any at all; stores end before others are told of them."""
    assert {item["kernel"] for item in found if item["settles"]} == {"decode_kernel"}
    for item in found:
        assert item["spills"] is not None, item
        assert item["settles"] is not False, f"publishes what is under way: {item}"
        if portion == "few":
            assert not item["spills"], item
        elif name.startswith("gfx9"):
            assert item["spills"] <= 16, item


def check_float8(name, found):
    """Caches hold the one form everywhere: no instruction converts it that knows another."""
    users = [item for item in found if "*fp8e4nv" in item["caches"]]
    assert bool(users) == (name in FLOAT8)
    for item in found:
        assert not item["float8"] or (item in users and name in CONVERTING), item
    assert any(item["float8"] for item in users) == (name in CONVERTING)
