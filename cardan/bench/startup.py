"""``cardan bench startup``: how long ``cardan serve`` takes from its start to its first token.

Each repeat starts the server anew as a process of its own, on a Unix socket. What is measured is
wall time from just before the process is made.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from cardan.bench.offline import Report
from cardan.bench.process_memory import MemoryUse, tree_memory
from cardan.bench.result import Result
from cardan.bench.statistics import distribution
from cardan.core.types.errors import CardanError, ConfigError
from cardan.core.weights.resolve import ModelFiles, resolve_model

PageCache = Literal["warm", "cold", "as-is"]

# How often an unready server is asked, seconds: the error of `ready_s`.
_POLL = 0.01
_STOP_PATIENCE = 20.0
_PHASE = re.compile(r'^cardan:startup_seconds\{.*phase="([^"]+)".*\} (\S+)$', re.MULTILINE)
_WEIGHT_SUFFIXES = (".gguf", ".safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupOptions:
    """A startup run.

    Attributes:
        model: As for ``cardan serve``.
        arguments: Further arguments of ``cardan serve``, without an address.
        settings: What those arguments set, by name; part of what is compared.
        repeats: Measured starts.
        page_cache: The weight files before each start: ``warm``: read once; ``cold``: dropped from
            the page cache; ``as-is``: left alone. The first two come after one unmeasured start,
            so that Python and its packages are always warm there.
        timeout: Seconds until a server that is not ready is given up.
        label: What the run is called.
        metadata: What else to remember.
    """

    model: str
    arguments: Sequence[str] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    repeats: int = 3
    page_cache: PageCache = "warm"
    timeout: float = 300.0
    label: str = ""
    metadata: dict[str, str] = field(default_factory=dict)


def run_startup(options: StartupOptions, report: Report) -> Result:
    """Start the server ``repeats`` times. An interrupt keeps the starts that were measured.

    Raises:
        CardanError: the server ended or was not ready in time; its log's end is in the message.
        KeyboardInterrupt: before the first start was measured.
    """
    if options.repeats < 1:
        raise ConfigError(f"repeats is {options.repeats}; it must be at least 1")
    files = weight_files(resolve_model(options.model))
    if options.page_cache == "cold" and not hasattr(os, "posix_fadvise"):
        raise ConfigError("page_cache: this system cannot drop files from its page cache; use warm")
    samples: list[dict[str, float]] = []
    interrupted = False
    try:
        if options.page_cache != "as-is":
            measure_start(options)
            report("unmeasured start done")
        for number in range(options.repeats):
            prepare_page_cache(files, options.page_cache)
            sample = measure_start(options)
            samples.append(sample)
            report(
                f"start {number + 1} of {options.repeats}: ready after {sample['ready_s']:.2f} s"
            )
    except KeyboardInterrupt:
        if not samples:
            report("interrupted before the first start was complete: nothing was measured")
            raise
        interrupted = True
    names = [name for name in samples[0] if all(name in sample for sample in samples)]
    return Result(
        kind="startup",
        model=options.model,
        config={"load": {"page_cache": options.page_cache}, "engine": options.settings},
        metrics={name: distribution([item[name] for item in samples], ()) for name in names},
        samples=samples,
        label=options.label,
        metadata=options.metadata,
        notes=[_NOTES[options.page_cache]],
        interrupted=interrupted,
    )


_NOTES: dict[PageCache, str] = {
    "warm": "page cache warm: one start was not measured, and the weight files were read",
    "cold": "page cache cold for the weight files, warm for Python and its packages",
    "as-is": "page cache as it was found",
}


def weight_files(model: ModelFiles) -> list[Path]:
    """The files that hold the weights."""
    if model.gguf is not None:
        return [model.gguf]
    return sorted(path for path in model.path.iterdir() if path.suffix in _WEIGHT_SUFFIXES)


def prepare_page_cache(files: Sequence[Path], state: PageCache) -> None:
    """Bring the files into the page cache, or drop them from it as far as nobody maps them."""
    for path in files if state != "as-is" else ():
        with path.open("rb", buffering=0) as file:
            if state == "warm":
                while file.read(1 << 24):
                    pass
            else:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure_start(options: StartupOptions) -> dict[str, float]:
    """Start one server, wait for its first token, and stop it.

    ``ready_s`` is when ``/ready`` answered 200, ``first_token_s`` when a completion of one token
    was there, both from the process's start. ``startup_s.*`` are the engine's own phases. Memory
    is summed over the server's processes after that token, and left out where it cannot be read.
    """
    with serving(options) as server:
        server.wait_ready(options.timeout)
        ready = time.perf_counter() - server.began
        server.complete_one_token()
        first_token = time.perf_counter() - server.began
        phases = server.startup_phases()
        memory = tree_memory(server.process.pid)
    figures = {"ready_s": ready, "first_token_s": first_token}
    figures |= {f"startup_s.{name}": seconds for name, seconds in phases.items()}
    return figures | _memory_figures(memory)


def _memory_figures(memory: MemoryUse | None) -> dict[str, float]:
    if memory is None:
        return {}
    return {
        "rss_bytes": memory.rss,
        "peak_rss_bytes": memory.peak_rss,
        "processes": memory.processes,
    }


@dataclass(frozen=True, slots=True)
class Server:
    """A running ``cardan serve``; ``began`` is of the clock ``time.perf_counter``."""

    process: subprocess.Popen[bytes]
    socket_path: Path
    log: Path
    began: float

    def wait_ready(self, timeout: float) -> None:
        """Ask until it is ready.

        Raises:
            CardanError: it ended, or the time is over.
        """
        while True:
            if self.process.poll() is not None:
                raise CardanError(
                    f"cardan serve ended with code {self.process.returncode}: {self._log_end()}"
                )
            if time.perf_counter() - self.began > timeout:
                raise CardanError(
                    f"cardan serve was not ready within {timeout:g} s (raise --timeout): "
                    f"{self._log_end()}"
                )
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self.request("GET", "/ready")[0] == 200:
                    return
            time.sleep(_POLL)

    def complete_one_token(self) -> None:
        """Ask for a completion of one token and wait for it."""
        body = json.dumps({"prompt": "Hello", "max_tokens": 1, "temperature": 0})
        status, answer = self.request("POST", "/v1/completions", body)
        if status != 200:
            raise CardanError(f"cardan serve answered {status} to a completion: {answer[:300]}")

    def startup_phases(self) -> dict[str, float]:
        """Seconds of each phase of the engine's start, as its metrics tell them."""
        _, text = self.request("GET", "/metrics")
        return {name: float(seconds) for name, seconds in _PHASE.findall(text)}

    def request(self, method: str, path: str, body: str | None = None) -> tuple[int, str]:
        """Status and body of one answer."""
        connection = _UnixConnection(str(self.socket_path))
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read().decode(errors="replace")
        finally:
            connection.close()

    def _log_end(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return " | ".join(lines[-5:]) or "it logged nothing"


@contextlib.contextmanager
def serving(options: StartupOptions) -> Iterator[Server]:
    """Start ``cardan serve``; it and its children are gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="cardan-") as folder:
        path, log = Path(folder) / "s", Path(folder) / "log"
        command = [sys.executable, "-m", "cardan", "serve", options.model, *options.arguments]
        with log.open("wb") as out:
            began = time.perf_counter()
            # A session of its own: an interrupt from the terminal reaches this process alone.
            process = subprocess.Popen(
                [*command, "--uds", str(path)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield Server(process, path, log, began)
        finally:
            _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask politely, then end the whole session that the server leads."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_PATIENCE)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=60)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
