"""Running modules of the kit in processes of their own, with a deadline."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import IO


@dataclass(frozen=True, slots=True)
class Origin:
    """What a process inherits."""

    environment: Mapping[str, str]
    directory: str
    umask: int

    @classmethod
    def here(cls) -> "Origin":
        """What this process would hand on now, and what it can import."""
        mask = os.umask(0o077)
        os.umask(mask)
        path = os.pathsep.join(filter(None, sys.path))
        return cls({**os.environ, "PYTHONPATH": path}, os.getcwd(), mask)

    def with_environment(self, more: Mapping[str, str]) -> "Origin":
        return replace(self, environment={**self.environment, **more})


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended. ``code`` is None where it was stopped at the deadline."""

    code: int | None
    output: str
    errors: str

    def complaint(self) -> str:
        """Why it is no success, with the last line that it wrote to stderr."""
        lines = [line for line in self.errors.splitlines() if line.strip()]
        if self.code is None:
            how = "did not end before its deadline"
        elif self.code < 0:
            how = f"was ended by {signal.Signals(-self.code).name}"
        else:
            how = f"ended with exit code {self.code}"
        return f"the process {how}" + (f": {lines[-1]}" if lines else "")


def run_modules(
    module: str,
    argument_lists: Sequence[Sequence[str]],
    deadline_s: float,
    origin: Origin,
) -> list[Ended]:
    """Run ``python -m module ARGUMENTS`` once for each list, all at the same time.

    Those still running after ``deadline_s`` are killed.
    """
    with ExitStack() as cleanup:
        started = []
        for arguments in argument_lists:
            # Files cannot fill up as pipes do.
            output = cleanup.enter_context(tempfile.TemporaryFile())
            errors = cleanup.enter_context(tempfile.TemporaryFile())
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                env=origin.environment,
                cwd=origin.directory,
                umask=origin.umask,
            )
            cleanup.callback(_stop, process)
            started.append((process, output, errors))
        end = time.monotonic() + deadline_s
        codes = [_wait(process, end) for process, _, _ in started]
        return [
            Ended(code, _text(output), _text(errors))
            for code, (_, output, errors) in zip(codes, started, strict=True)
        ]


def _stop(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.kill()
        process.wait()


def _wait(process: "subprocess.Popen[bytes]", end: float) -> int | None:
    try:
        return process.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
