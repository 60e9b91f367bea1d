"""The C files of the kernels as compilers see them that warn, which the build itself does not ask
for."""

import os
import platform
import subprocess
from pathlib import Path

import pytest

from cardan.platforms.cpu import native
from cardan.platforms.cpu.native.build import BASE_FLAGS, accepts, find_compiler, sources
from cardan.platforms.cpu.native.isa import AMX, choose_level
from cardan.platforms.cpu.native.library import NativeUnavailable

FOLDER = Path(native.__file__).parent
X86 = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni")
LEVELS = {"lowest": (), "avx2": X86[:3], "amx": (*X86, "avx512_bf16", *AMX)}


@pytest.mark.parametrize("level", LEVELS)
def test_no_file_has_warnings(level):
    try:
        compiler = find_compiler(os.environ)
    except NativeUnavailable as missing:
        pytest.skip(str(missing))
    chosen = choose_level(platform.machine(), LEVELS[level], {})
    flags = [flag for flag in (*BASE_FLAGS, *chosen.flags) if flag != "-w"]
    if not accepts(compiler, flags):
        pytest.skip(f"{compiler.command[0]} is too old for {level}")
    files = [str(file) for file in sources(FOLDER) if file.suffix == ".c"]
    # Vectors are passed to inlined functions only.
    warnings = ("-Wall", "-Wextra", "-Wno-psabi", "-Werror", "-fsyntax-only")
    done = subprocess.run(
        [*compiler.command, *flags, *warnings, *files], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[:4000]
