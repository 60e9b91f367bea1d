"""Kernels for Arm, compiled by a cross compiler and run by QEMU on processors that have no more
than their level asks for."""

import shutil
from pathlib import Path

import pytest
from emulated_kernels import FAMILIES, run_unit_tests

TOOLS = {
    "aarch64-linux-gnu-gcc": "gcc-aarch64-linux-gnu libc6-dev-arm64-cross",
    "qemu-aarch64": "qemu-user",
}
MISSING = [packages for tool, packages in TOOLS.items() if shutil.which(tool) is None]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"no Arm: install {' '.join(MISSING)}"),
    pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs Linux's /proc"),
]


# Families of kernels that every run tests: on the lowest level all; on the highest those with
# instructions of the levels between, or for which the compiler chooses SVE.
FAMILIES_OF = {"neon": FAMILIES, "sve": ("linear", "blocks", "sampling", "experts")}
LEVELS = ("neon", "dotprod", "i8mm", "sve")
# Graphs make calls in C, which cannot go from one architecture to the other.
_NOT_EMULATED = ("captured",)
# What takes QEMU long, and is about threads, statistics and scale more than about instructions.
COSTLY = (
    *_NOT_EMULATED,
    "threads",
    "depend",
    "huge",
    "large",
    "frequencies",
    "last_place",
    "ties",
    "masked",
    "long",
    # Short types are those of caches, which all are run with each.
    "(features_agree_with_oracle and float16)",
)


@pytest.mark.parametrize("level", FAMILIES_OF)
def test_kernels_agree_with_their_truth(level: str, tmp_path: Path) -> None:
    run_unit_tests(tmp_path, "aarch64", level, FAMILIES_OF[level], without=COSTLY)


@pytest.mark.scheduled
@pytest.mark.timeout(900)
@pytest.mark.parametrize("level", LEVELS)
def test_kernels_pass_all_unit_tests(level: str, tmp_path: Path) -> None:
    run_unit_tests(tmp_path, "aarch64", level, FAMILIES, without=_NOT_EMULATED)
