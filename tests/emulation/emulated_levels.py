"""A plugin of pytest: unit tests of the kernels find them compiled for a level of instructions
that is emulated.

``CARDAN_CPU_ISA`` names the level, ``EMULATED_MACHINE`` its architecture: x86_64, where ``CC`` is
``simde_cc``, or aarch64. Tests with a parameter that stands for another level are left out.
"""

import os
import platform

import torch  # noqa: F401  (before it is misled about the machine)

from cardan.platforms.cpu import cpu_info

LEVEL = os.environ["CARDAN_CPU_ISA"]
# Fixtures and parameters that stand for levels, and what is as good as the level's name.
_PARAMETERS = ("isa", "any_isa", "kernels", "linear", "provider")
_HIGHEST = "best"


def _mislead(machine, features):
    """Modules of kernels are imported later, and see a machine with these."""
    cpu_info.instruction_sets = lambda root: features
    platform.machine = lambda: machine


def _open_once(open_library):
    """``open_library`` of all kernels, whichever of them a test would have compiled alone: they
    take longer to compile than elsewhere, and are kept."""
    kept = os.environ["XDG_CACHE_HOME"]

    def opened(environment, root=None, folder=None):
        return open_library({**environment, "XDG_CACHE_HOME": kept})

    return opened


if os.environ["EMULATED_MACHINE"] == "aarch64":
    import arm_library

    _mislead("aarch64", arm_library.FEATURES)
    from cardan.platforms.cpu.native import library

    library.open_library = _open_once(arm_library.open_library)
else:
    _mislead("x86_64", cpu_info.INSTRUCTION_SETS)
    from cardan.platforms.cpu.native import amx

    amx.amx_refusal = lambda: None
    from cardan.platforms.cpu.native import library

    library.open_library = _open_once(library.open_library)


def pytest_collection_modifyitems(config, items):
    def is_of_level(item):
        values = item.callspec.params if hasattr(item, "callspec") else {}
        return all(values.get(name, LEVEL) in (LEVEL, _HIGHEST) for name in _PARAMETERS)

    others = [item for item in items if not is_of_level(item)]
    items[:] = [item for item in items if is_of_level(item)]
    config.hook.pytest_deselected(items=others)


def pytest_report_header():
    from cardan.platforms.cpu.native.library import native_status

    return f"kernels: {native_status()}"
