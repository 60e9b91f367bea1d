"""Kernels for x86 instructions that this machine may lack, run by SIMDe on those of AVX2."""

import platform
from pathlib import Path

import pytest
from emulated_kernels import FAMILIES, run_unit_tests

from cardan.platforms.cpu.cpu_info import instruction_sets

HEADERS = Path("/usr/include/simde/x86/avx512/fmadd.h")
NEEDED = {"avx2", "fma", "f16c"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HEADERS.exists(), reason="no SIMDe: install libsimde-dev"),
    pytest.mark.skipif(
        platform.machine() != "x86_64" or not set(instruction_sets(Path("/"))) >= NEEDED,
        reason="SIMDe's intrinsics are made of those of AVX2, FMA and F16C, which this CPU lacks",
    ),
]


# Families whose code differs from that of a level that is tested anyway: AVX512 with VNNI alone has
# none, and products of bytes are for blocks.
LEVELS = {
    "avx2_vnni": ("blocks",),
    "avx512": ("linear", "blocks"),
    "avx512_bf16": FAMILIES,
}


@pytest.mark.parametrize("level", LEVELS)
def test_kernels_agree_with_their_truth(level: str, tmp_path: Path) -> None:
    run_unit_tests(tmp_path, "x86_64", level, LEVELS[level])


@pytest.mark.scheduled
@pytest.mark.timeout(900)
@pytest.mark.parametrize("level", [*LEVELS, "avx512_vnni"])
def test_kernels_pass_all_unit_tests(level: str, tmp_path: Path) -> None:
    run_unit_tests(tmp_path, "x86_64", level, FAMILIES)


def test_kernels_for_tile_registers_agree_with_their_truth(tmp_path: Path) -> None:
    """What this level has of its own; the rest is that of the level below."""
    float16 = "(float16 and not bfloat16)"
    others = ("float32", float16, "several_threads", "decoding", "edge_blocks", "a_row_does_not")
    families = ("linear", "blocks", "experts")
    run_unit_tests(tmp_path, "x86_64", "amx", families, without=others)
