"""Places that cannot be written: full disks, closed pipes, read-only homes."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from server_process import free_port

FULL = Path("/dev/full")
CARDAN = [sys.executable, "-m", "cardan"]
PROMPT = ("run", "demo", "-p", "Count to five.", "--max-tokens", "8", "--dtype", "float32")
NO_SPACE = "error: cannot write the output: No space left on device; make room, or write elsewhere"

pytestmark = pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full here")


@contextmanager
def full() -> Iterator[int]:
    """A descriptor of a disk without space."""
    descriptor = os.open(FULL, os.O_WRONLY)
    yield descriptor
    os.close(descriptor)


@contextmanager
def closed_pipe() -> Iterator[int]:
    """The end to write to of a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


def run(*arguments: str, **options) -> subprocess.CompletedProcess:
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.run(
        [*CARDAN, *arguments],
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=120,
        check=False,
        **options,
    )


def wait_for_port(port: int, server: subprocess.Popen, patience: float = 60.0) -> None:
    deadline = time.monotonic() + patience
    while True:
        assert server.poll() is None, f"the server ended with {server.returncode}"
        assert time.monotonic() < deadline, "the server took too long"
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.05)


@pytest.mark.parametrize("arguments", ["platforms", "platforms --json", "--help", "run --help"])
def test_output_to_a_full_disk(arguments) -> None:
    with full() as out:
        done = run(*arguments.split(), stdout=out)
    assert done.stderr.splitlines() == [NO_SPACE]
    assert done.returncode == 1


@pytest.mark.parametrize("arguments", ["platforms", "platforms --json", "--help"])
def test_output_to_a_closed_pipe(arguments) -> None:
    with closed_pipe() as out:
        done = run(*arguments.split(), stdout=out)
    assert done.stderr == ""
    assert done.returncode == 141


@pytest.mark.parametrize("place", [full, closed_pipe])
def test_errors_that_nobody_can_read_keep_their_codes(place) -> None:
    with place() as err:
        assert run("platforms", "--no-such-option", stderr=err).returncode == 2
        assert run("run", "/no/such/model.gguf", "-p", "x", stderr=err).returncode == 1
        assert run("platforms", stderr=err).returncode == 0


def test_closed_streams() -> None:
    command = f"{' '.join(CARDAN)} platforms"
    for redirection, code in ((">&-", 0), ("2>&-", 0), (">&- 2>&-", 0)):
        done = subprocess.run(
            ["sh", "-c", f"{command} {redirection}"], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (code, ""), redirection


@pytest.mark.model
@pytest.mark.slow
def test_an_answer_to_a_full_disk_or_a_closed_pipe() -> None:
    with full() as out:
        done = run(*PROMPT, stdout=out)
    assert [line for line in done.stderr.splitlines() if "error" in line] == [NO_SPACE]
    assert "Traceback" not in done.stderr
    assert done.returncode == 1
    with closed_pipe() as out:
        done = run(*PROMPT, stdout=out)
    assert "rror" not in done.stderr
    assert done.returncode == 141


@pytest.mark.model
@pytest.mark.slow
def test_a_server_outlives_a_full_log() -> None:
    port = free_port()
    arguments = ("serve", "demo", "--port", str(port), "--kv-cache-memory-bytes", "50MiB")
    url = f"http://127.0.0.1:{port}/v1/completions"
    with full() as log:
        server = subprocess.Popen([*CARDAN, *arguments], stdout=log, stderr=log)
    try:
        # The socket listens before the engine is ready: early clients wait.
        wait_for_port(port, server)
        body = {"prompt": "One, two,", "max_tokens": 4, "temperature": 0}
        for _ in range(3):
            answer = httpx.post(url, json=body, timeout=120)
            assert answer.status_code == 200
            assert answer.json()["choices"][0]["text"]
        assert httpx.post(url, json={**body, "n": 0}, timeout=60).status_code == 400
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    finally:
        server.kill()
        server.wait()


@pytest.mark.model
@pytest.mark.slow
def test_a_local_model_needs_no_place_to_write(tmp_path) -> None:
    nowhere = "/dev/full/nowhere"
    places = ("HOME", "HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME", "TMPDIR", "TORCH_HOME")
    environment = {**os.environ, **dict.fromkeys(places, nowhere), "PYTHONDONTWRITEBYTECODE": "1"}
    done = run(*PROMPT, env=environment, cwd="/")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("/dev/full/engine.sock", "Not a directory"),
        ("/no/such/folder/engine.sock", "No such file or directory"),
        ("/tmp/" + "n" * 200, "path too long"),
    ],
)
def test_a_socket_that_cannot_be_made(place, reason) -> None:
    done = run("serve", "demo", "--uds", place)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert f"cannot listen on {place}" in done.stderr
    assert reason in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting takes root")
def test_a_socket_on_a_read_only_or_full_disk(tmp_path) -> None:
    for options, reason in (("ro", "Read-only file system"), ("nr_inodes=1", "No space left")):
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size=16k,{options}", "tmpfs", str(tmp_path)],
            capture_output=True,
            check=False,
        )
        if mounted.returncode:
            pytest.skip("mounting is not allowed here")
        try:
            done = run("serve", "demo", "--uds", str(tmp_path / "s"))
        finally:
            subprocess.run(["umount", str(tmp_path)], check=True)
        assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
        assert reason in done.stderr
