"""Libraries of some of the native kernels, at each level of instructions this CPU has."""

import os
import platform
import shutil
from pathlib import Path

from cardan.platforms.cpu import native
from cardan.platforms.cpu.cpu_info import instruction_sets
from cardan.platforms.cpu.native.isa import usable_levels
from cardan.platforms.cpu.native.library import open_library

LEVELS = [
    level.name for level in usable_levels(platform.machine(), instruction_sets(Path("/")), {})
]


def compiled(folder, level, *patterns, **environment):
    """The library of the files of these patterns alone, since all take long to compile."""
    for pattern in ("pool.[ch]", "simd.h", "amx.h", *patterns):
        for file in Path(native.__file__).parent.glob(pattern):
            shutil.copy(file, folder)
    asked = {"CARDAN_CPU_ISA": level, "XDG_CACHE_HOME": str(folder), **environment}
    found = open_library({**os.environ, **asked}, folder=folder)
    assert found.isa == level
    return found
