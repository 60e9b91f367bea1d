"""``cardan serve`` as a user starts it."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil


@dataclass
class Server:
    process: subprocess.Popen
    url: str
    log: Path

    @property
    def engine(self) -> psutil.Process:
        """The engine's own process."""
        [child] = [
            child
            for child in psutil.Process(self.process.pid).children()
            if "engine_main" in " ".join(child.cmdline())
        ]
        return child

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=10)

    def metric(self, name: str) -> float:
        """Sum of a metric's samples."""
        lines = self.get("/metrics").text.splitlines()
        values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0] == name]
        assert values, f"no metric {name}"
        return sum(values)

    def wait_idle(self, patience: float = 10.0) -> None:
        deadline = time.monotonic() + patience
        gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        while any(self.metric(f"cardan:{name}") for name in gauges):
            assert time.monotonic() < deadline, "the engine did not become idle"
            time.sleep(0.05)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@contextmanager
def serving(
    log: Path, *arguments: str, model: str | Path = "demo", patience: float = 60.0
) -> Iterator[Server]:
    port = free_port()
    command = [sys.executable, "-m", "cardan", "serve", str(model), "--port", str(port), *arguments]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    server = Server(process, f"http://127.0.0.1:{port}", log)
    try:
        deadline = time.monotonic() + patience
        while True:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            try:
                if server.get("/ready").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        yield server
    finally:
        children = (
            psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        )
        process.kill()
        process.wait()
        _gone, alive = psutil.wait_procs(children, timeout=10)
        assert not alive, "the engine outlived its server"
