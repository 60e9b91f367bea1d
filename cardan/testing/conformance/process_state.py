"""What a process shares between all of its code, so that it can be seen who changed it."""

import locale
import logging
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# Kinds of shared state that a platform has to leave alone.
KINDS: tuple[str, ...] = (
    "environment",
    "directory, umask and locale",
    "signal handlers",
    "random state",
    "warning filters",
    "import path and hooks",
    "root logging",
    "threads",
    "processes",
    "device files",
)

# Files below /dev that are no devices of interest.
_HARMLESS_FILES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty")
_HARMLESS_FOLDERS = ("/dev/pts/", "/dev/shm/", "/dev/fd/")


@dataclass(frozen=True, slots=True)
class ProcessState:
    """State by kind; each kind maps names to printable values."""

    kinds: dict[str, dict[str, str]]

    def changes_since(self, before: "ProcessState") -> dict[str, list[str]]:
        """For each kind what differs now, in words."""
        return {kind: _changes(before.kinds[kind], self.kinds[kind]) for kind in KINDS}


def take_state() -> ProcessState:
    """The state of this process now. Threads, children and files are seen on Linux only."""
    return ProcessState({kind: reader() for kind, reader in _READERS.items()})


def _changes(before: dict[str, str], after: dict[str, str]) -> list[str]:
    changes = [f"{name} is new: {after[name]}" for name in after if name not in before]
    changes += [f"{name} is gone" for name in before if name not in after]
    changes += [
        f"{name} was {before[name]}, is {after[name]}"
        for name in after
        if name in before and before[name] != after[name]
    ]
    return changes


def _place() -> dict[str, str]:
    mask = os.umask(0o077)
    os.umask(mask)
    return {
        "directory": os.getcwd(),
        "umask": oct(mask),
        "locale": locale.setlocale(locale.LC_ALL),
    }


def _signals() -> dict[str, str]:
    return {number.name: repr(signal.getsignal(number)) for number in signal.Signals}


def _random() -> dict[str, str]:
    states = {"random": str(hash(random.getstate()))}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        states["numpy.random"] = str(hash(numpy.random.get_state(legacy=True)[1].tobytes()))
    return states


def _warnings() -> dict[str, str]:
    names = [f"{item[0]} for {item[2]} in {item[3]}" for item in warnings.filters]
    return {name: str(names.count(name)) for name in names}


def _imports() -> dict[str, str]:
    return {
        "sys.path": str(sys.path),
        "sys.meta_path": str([str(finder) for finder in sys.meta_path]),
        "sys.excepthook": repr(sys.excepthook),
        "sys.stdout": repr(sys.stdout),
        "sys.stderr": repr(sys.stderr),
    }


def _logging() -> dict[str, str]:
    root = logging.getLogger()
    return {"level": str(root.level), "handlers": str(root.handlers)}


def _threads() -> dict[str, str]:
    threads = {f"thread {item.name}": "running" for item in threading.enumerate()}
    tasks = Path("/proc/self/task")
    if tasks.exists():
        threads["number of native threads"] = str(len(list(tasks.iterdir())))
    return threads


def _processes() -> dict[str, str]:
    children: dict[str, str] = {}
    for listed in Path("/proc/self/task").glob("*/children"):
        for process in listed.read_text(encoding="ascii").split():
            children[f"process {process}"] = _command(process)
    return children


def _command(process: str) -> str:
    try:
        raw = Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return "ended"
    return raw.replace(b"\0", b" ").decode(errors="replace").strip()


def _device_files() -> dict[str, str]:
    found: dict[str, str] = {}
    folder = Path("/proc/self/fd")
    for entry in folder.iterdir() if folder.exists() else ():
        try:
            path = os.readlink(entry)
        except OSError:  # the folder's own descriptor, closed meanwhile
            continue
        if path.startswith("/dev/") and not _is_harmless(path):
            found[path] = "open"
    return found


def _is_harmless(path: str) -> bool:
    return path in _HARMLESS_FILES or path.startswith(_HARMLESS_FOLDERS)


_READERS: dict[str, Callable[[], dict[str, str]]] = {
    "environment": lambda: dict(os.environ),
    "directory, umask and locale": _place,
    "signal handlers": _signals,
    "random state": _random,
    "warning filters": _warnings,
    "import path and hooks": _imports,
    "root logging": _logging,
    "threads": _threads,
    "processes": _processes,
    "device files": _device_files,
}
