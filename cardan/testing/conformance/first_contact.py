"""Meets one platform in a fresh process, and prints as JSON what that changed there.

``python -m cardan.testing.conformance.first_contact MODULE ATTRIBUTE [fork]``
"""

import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from operator import attrgetter
from typing import Any

# Loaded before the first look, so that their effects are not laid at the platform's door.
import numpy  # noqa: F401

from cardan.core.interfaces.platform import Platform
from cardan.core.types.model import ModelSummary
from cardan.testing.conformance.process_state import take_state

STAGES: tuple[str, ...] = ("import", "probe", "describe")

_FORK_DEADLINE_S = 20.0
_MODEL = ModelSummary(
    architecture="LlamaForCausalLM",
    vocab_size=1000,
    hidden_size=64,
    num_layers=2,
    max_model_len=256,
    dtype="float32",
)


class Observer:
    """Runs stages one after another, each under a guard, and notes what each of them changed."""

    def __init__(self) -> None:
        self.stages: dict[str, dict[str, Any]] = {}

    def observe(self, name: str, stage: Callable[[], None]) -> bool:
        """Whether ``stage`` ended without raising."""
        before, modules = take_state(), set(sys.modules)
        start = time.perf_counter()
        error = ""
        try:
            stage()
        except (Exception, SystemExit) as raised:
            error = f"{type(raised).__name__}: {raised}"
        self.stages[name] = {
            "seconds": time.perf_counter() - start,
            "error": error,
            "changes": take_state().changes_since(before),
            "imported": _foreign(set(sys.modules) - modules),
        }
        return not error


def meet(module: str, attribute: str) -> dict[str, Any]:
    """Import, probe twice, and ask for all facts that need no opened device."""
    observer = Observer()
    met: dict[str, Any] = {"probes": [], "devices": []}
    made: list[Platform] = []

    def load() -> None:
        made.append(attrgetter(attribute)(import_module(module))())

    def probe() -> None:
        met["probes"] = [asdict(made[0].probe()) for _ in range(2)]

    def describe() -> None:
        platform = made[0]
        devices = platform.devices()
        met["devices"] = [asdict(info) for info in devices]
        for info in devices:
            platform.capabilities(info)
            platform.shapes(_MODEL, info)
            platform.kernels(info)
        for role in ("server", "engine", "worker"):
            platform.child_env(role, devices)

    has_answered = observer.observe("import", load) and observer.observe("probe", probe)
    if has_answered and met["probes"][0]["state"] == "present":
        observer.observe("describe", describe)
    return {"stages": observer.stages, **met}


def meet_and_fork(module: str, attribute: str) -> dict[str, Any]:
    """Import and probe, then probe in a fork of this process."""
    platform = attrgetter(attribute)(import_module(module))()
    mine = asdict(platform.probe())
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = json.dumps(asdict(platform.probe()))
        except Exception as error:
            answer = json.dumps({"error": f"{type(error).__name__}: {error}"})
        os.write(write_end, answer.encode())
        os._exit(0)
    os.close(write_end)
    ready, _, _ = select.select([read_end], [], [], _FORK_DEADLINE_S)
    if not ready:
        os.kill(child, signal.SIGKILL)
    answered = b"".join(iter(lambda: os.read(read_end, 65536), b"")) if ready else b""
    os.waitpid(child, 0)
    return {"parent": mine, "child": json.loads(answered) if answered else None}


def _foreign(names: set[str]) -> list[str]:
    """Top-level packages among module names that are neither Python's nor cardan's."""
    packages = {name.partition(".")[0] for name in names}
    known = sys.stdlib_module_names | {"cardan"}
    return sorted(name for name in packages if name not in known and not name.startswith("__"))


def reset_signals() -> None:
    """Undo what the starting process ignores, which is inherited; Python's own choices stay."""
    for number in signal.Signals:
        ignored = signal.getsignal(number) is signal.SIG_IGN
        if ignored and number not in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)


if __name__ == "__main__":
    reset_signals()
    act = meet_and_fork if sys.argv[3:] == ["fork"] else meet
    answered_by = act(sys.argv[1], sys.argv[2])
    sys.stdout.write("\n" + json.dumps(answered_by, default=str) + "\n")
    sys.stdout.flush()
    os._exit(0)  # whatever a faulty platform has running must not hold the answer back
