"""Two servers on one machine: apart when they can be, and plain words when they cannot."""

import asyncio
import http.client
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from clients import Address, visit_many
from load_server import KNOWN, ROOMY, TINY, check_log, idle_footprint, known_answer
from server_process import Server, serving

pytestmark = [pytest.mark.model, pytest.mark.slow]

OTHER = (*TINY, "--seed", "2")  # of an option given twice the last counts


def test_two_servers_do_not_mix(tmp_path: Path) -> None:
    """Other weights each; both under load at once, one of them ended by force in between."""
    with serving(tmp_path / "one", *TINY, *ROOMY) as one:
        first = known_answer(one)
        with serving(tmp_path / "two", *OTHER, *ROOMY) as two:
            assert one.engine.pid != two.engine.pid
            second = known_answer(two)
            assert first != second

            async def load() -> None:
                async with asyncio.TaskGroup() as group:
                    for server in (one, two):
                        group.create_task(visit_many(Address.of(server.url), 60, 10, 1))

            asyncio.run(load())
            for server, expected in ((one, first), (two, second)):
                idle_footprint(server)
                assert known_answer(server) == expected
                check_log(server)
        assert known_answer(one) == first


def cardan_serve(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "cardan", "serve", "demo", *TINY, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def check_refusal(done: subprocess.CompletedProcess, *words: str) -> None:
    assert done.returncode == 1
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line]
    assert len(lines) == 1, lines
    for word in words:
        assert word in lines[0], lines[0]


def test_port_taken(server: Server) -> None:
    """Said before the model is loaded, in one line with the remedy; the holder goes on."""
    port = server.url.rpartition(":")[2]
    check_refusal(cardan_serve("--port", port), f"port {port}", "in use", "--port")
    assert server.get("/ready").status_code == 200
    assert known_answer(server)


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
def test_port_taken_by_something_else(host: str) -> None:
    with socket.socket() as sock:
        sock.bind((host, 0))
        sock.listen()
        port = str(sock.getsockname()[1])
        check_refusal(cardan_serve("--port", port), f"port {port}", "in use", "--port")


def test_unix_socket_taken_stale_or_no_socket(tmp_path: Path) -> None:
    path = tmp_path / "cardan.sock"
    taken = cardan_uds(path)
    try:
        wait_for(path)
        check_refusal(cardan_serve("--uds", str(path)), str(path), "in use", "--uds")
        assert ask(path) is not None
    finally:
        taken.kill()
        taken.wait()
    assert path.exists()  # left behind by the kill, and no obstacle
    again = cardan_uds(path)
    try:
        wait_for(path)
        again.terminate()
        assert again.wait(20) == 0
    finally:
        again.kill()
        again.wait()
    assert not path.exists()
    path.write_text("precious")
    check_refusal(cardan_serve("--uds", str(path)), str(path))
    assert path.read_text() == "precious"


def cardan_uds(path: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "cardan", "serve", "demo", *TINY, *ROOMY, "--uds", str(path)]
    with (path.parent / "log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


class UnixConnection(http.client.HTTPConnection):
    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(30)
        try:
            self.sock.connect(self.host)
        except OSError:
            self.sock.close()
            raise


def ask(path: Path) -> list[int] | None:
    """The known answer; None while nobody listens."""
    connection = UnixConnection(str(path))
    headers = {"Host": "cardan", "Content-Type": "application/json"}
    try:
        connection.request("POST", "/v1/completions", json.dumps(KNOWN), headers)
        response = connection.getresponse()
        assert response.status == 200
        return json.loads(response.read())["choices"][0]["token_ids"]
    except (FileNotFoundError, ConnectionRefusedError):
        return None
    finally:
        connection.close()


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while ask(path) is None:
        assert time.monotonic() < deadline, (path.parent / "log").read_text()
        time.sleep(0.1)
