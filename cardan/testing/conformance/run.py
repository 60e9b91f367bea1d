"""Runs the kit as ``cardan conformance`` does: pytest in a process of its own, free of the
configuration of whatever project the user stands in."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from cardan.core.types.errors import ConfigError

PLUGIN = "cardan.testing.conformance.plugin"

_KIT = str(Path(__file__).parent)
_ENTRY_POINT = "cardan-conformance"
_INTERRUPT_DEADLINE_S = 20.0
# Exit codes of pytest.
_OK, _FAILED, _INTERRUPTED, _USAGE, _NOTHING = 0, 1, 2, 4, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class KitRun:
    """What to run. Options left empty or None are the kit's defaults."""

    spec: str
    levels: str | None = None
    json_file: str | None = None
    markdown_file: str | None = None
    badge_file: str | None = None
    seed: int | None = None
    expression: str | None = None
    is_verbose: bool = False


def run_kit(run: KitRun) -> int:
    """Run, with the output on this process's own, and return the exit code.

    0: nothing failed; 1: something failed; 2: the request is wrong; 130: interrupted.

    Raises:
        ConfigError: pytest is not installed.
    """
    if find_spec("pytest") is None:
        raise ConfigError("the kit needs pytest: pip install 'cardan[conformance]'")
    # In a group of its own, a terminal's Ctrl-C reaches it through us alone, and once.
    process = subprocess.Popen(
        command(run), stdin=subprocess.DEVNULL, env=_environment(), process_group=0
    )
    try:
        return _exit_code(process.wait())
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        _await_end(process)
        return 130
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def command(run: KitRun) -> list[str]:
    """The command line that runs the kit."""
    options = [
        ("--cardan-level", run.levels),
        ("--cardan-json", run.json_file),
        ("--cardan-markdown", run.markdown_file),
        ("--cardan-badge", run.badge_file),
        ("--cardan-seed", run.seed),
    ]
    given = [f"{name}={value}" for name, value in options if value is not None]
    return [
        # By its place, not its name: pytest would look for conftest.py where it is called from.
        *(sys.executable, "-m", "pytest", _KIT),
        *("-c", os.devnull, "--rootdir", _KIT),
        *("-p", "no:cacheprovider", "-p", _plugin(), "--import-mode=importlib"),
        *("-W", "default", "--continue-on-collection-errors", "--no-header", "-rN"),
        *(("-v", "--tb=short") if run.is_verbose else ("-q", "--tb=no")),
        *(("-k", run.expression) if run.expression else ()),
        f"--cardan-platform={run.spec}",
        *given,
    ]


def _environment() -> dict[str, str]:
    """This process's, without what changes pytest: other plugins and options of the user's."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    return {**kept, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def _plugin() -> str:
    """The name to load the plugin by: its entry point, or where metadata lacks that, its module."""
    found = entry_points(group="pytest11", name=_ENTRY_POINT)
    return _ENTRY_POINT if found else PLUGIN


def _exit_code(code: int) -> int:
    if code < 0:
        name = signal.Signals(-code).name
        print(
            f"the kit's process was ended by {name}; the last test that it began failed so",
            file=sys.stderr,
        )
        return 1
    return {_OK: 0, _FAILED: 1, _INTERRUPTED: 130, _USAGE: 2, _NOTHING: 2}.get(code, 1)


def _await_end(process: "subprocess.Popen[bytes]") -> None:
    try:
        process.wait(_INTERRUPT_DEADLINE_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        return  # the caller kills it


def join_levels(levels: Sequence[str]) -> str | None:
    """Levels given one by one or comma-separated, as one option; None: all."""
    return ",".join(levels) if levels else None
