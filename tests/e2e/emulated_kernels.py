"""Runs the kernels' unit tests in a process that finds kernels for an emulated level."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
EMULATION = TESTS / "emulation"
FAMILIES = ("linear", "blocks", "attention", "rotation", "elementwise", "sampling", "experts")
# Tests that serve numba's kernels too.
SHARED = {"blocks": "test_cpu_block_providers.py", "attention": "test_cpu_attention_providers.py"}
# What does not depend on the level: messages, the choice of kernels.
_NOT_OF_A_LEVEL = (
    "providers_import_no_torch",
    "refus",
    "bad_input",
    "errors_name",
    "what_the_kernels_do_not_know",
    "registry",
)


def run_unit_tests(
    folder: Path, machine: str, level: str, families: tuple[str, ...], without: tuple[str, ...] = ()
) -> None:
    """``folder`` keeps what is compiled; tests whose names fit an expression of ``without`` are
    left out."""
    environment = {
        **os.environ,
        "CARDAN_CPU_ISA": level,
        "EMULATED_MACHINE": machine,
        "PYTHONPATH": str(EMULATION),
        "XDG_CACHE_HOME": str(folder),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    if machine == "x86_64":
        environment["CC"] = str(EMULATION / "simde_cc")
    names = [f"test_cpu_native_{family}.py" for family in families]
    names += [SHARED[family] for family in families if family in SHARED]
    files = [str(TESTS / "unit" / name) for name in names]
    words = " or ".join((*_NOT_OF_A_LEVEL, *without))
    plugins = ["-p", "emulated_levels", "-p", "pytest_timeout", "-p", "no:cacheprovider"]
    options = ["-q", "-x", *plugins, "-k", f"not ({words})"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        env=environment,
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        timeout=880,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    # Whatever the reason for it, what is skipped was not run.
    assert "skipped" not in done.stdout, done.stdout[-2000:]
