"""The server's socket, its drain and its end."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import httpx
import pytest
from server_helpers import FakeEngine, Sample, read_events, running, wait_until

from cardan.core.config.server import ServerConfig
from cardan.core.types.errors import ConfigError
from cardan.server.sockets import reserve_socket


def in_thread(function):
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    return thread, results


# -- sockets --------------------------------------------------------------------------------------


def test_a_taken_port_is_one_clear_line():
    with reserve_socket(ServerConfig(port=0)) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            reserve_socket(ServerConfig(port=port))
    message = str(caught.value)
    assert message == (
        f"cannot listen on port {port} on 127.0.0.1: it is in use; "
        "choose another with --port (or --uds), or stop what holds it"
    )


@pytest.mark.parametrize(
    ("host", "words"),
    [("203.0.113.9", "no such address"), ("no.such.host.invalid", "host name is unknown")],
)
def test_addresses_that_cannot_be(host, words):
    with pytest.raises(ConfigError, match=words):
        reserve_socket(ServerConfig(host=host, port=0))


@pytest.mark.parametrize("host", ["localhost", "0.0.0.0", ""])
def test_hosts(host):
    with reserve_socket(ServerConfig(host=host, port=0)) as sock:
        assert sock.getsockname()[1] > 0


def test_unix_socket_stale_live_and_in_the_way(tmp_path):
    path = str(tmp_path / "s.sock")
    config = ServerConfig(uds=path)
    with reserve_socket(config), pytest.raises(ConfigError, match="in use"):
        reserve_socket(config)
    assert os.path.exists(path)  # stale now, as after a crash
    with reserve_socket(config):
        pass
    file = tmp_path / "file"
    file.write_text("precious")
    with pytest.raises(ConfigError, match="in use"):
        reserve_socket(ServerConfig(uds=str(file)))
    assert file.read_text() == "precious"
    with pytest.raises(ConfigError, match="cannot listen on"):
        reserve_socket(ServerConfig(uds=str(tmp_path / "none" / "s.sock")))


def test_early_clients_wait_until_the_server_runs():
    sock = reserve_socket(ServerConfig(port=0))
    with socket.create_connection(sock.getsockname()) as client:
        assert client.fileno() > 0
    sock.close()


# -- drain ----------------------------------------------------------------------------------------


def slow_engine(length=30, delay=0.01):
    return FakeEngine(samples=[Sample.of("x" * length)], delay=delay)


def test_drain_lets_running_requests_finish_and_turns_new_ones_away():
    with running(slow_engine(60)) as server:
        streaming, streams = in_thread(lambda: server.chat(stream=True))
        whole, wholes = in_thread(lambda: httpx.post(
            f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 60}
        ))  # fmt: skip
        wait_until(lambda: server.engine.num_live == 2)
        server.stop()
        wait_until(lambda: server.http.get("/ready").status_code == 503)
        refused = server.chat()
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert refused.headers["connection"] == "close"
        assert "shutting down" in refused.json()["error"]["message"]
        assert server.http.get("/health").status_code == 200
        assert server.http.get("/metrics").status_code == 200
        streaming.join(10)
        whole.join(10)
        server.thread.join(10)
        assert not server.thread.is_alive()
    assert read_events(streams[0])[-1]["choices"][0]["finish_reason"] == "stop"
    assert wholes[0].json()["choices"][0]["text"] == "x" * 60
    assert server.engine.aborted == []


def test_an_idle_server_stops_at_once():
    with running() as server:
        server.stop()
        server.thread.join(10)
        assert not server.thread.is_alive()
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")


def test_requests_that_outlast_the_grace_end_with_an_error():
    with running(slow_engine(400), shutdown_timeout=0.1) as server:
        streaming, streams = in_thread(lambda: server.chat(stream=True))
        whole, wholes = in_thread(lambda: httpx.post(
            f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 400}
        ))  # fmt: skip
        wait_until(lambda: server.engine.num_live == 2)
        time.sleep(0.03)
        server.stop()
        streaming.join(10)
        whole.join(10)
        server.thread.join(10)
        assert not server.thread.is_alive()
    events = read_events(streams[0])
    assert events[0]["choices"]
    assert events[-1]["error"]["code"] == 503
    assert events[-1]["error"]["type"] == "ServiceUnavailableError"
    assert wholes[0].status_code == 503
    assert len(server.engine.aborted) == 2
    assert server.engine.num_live == 0


def test_a_second_stop_does_not_wait():
    with running(slow_engine(400), shutdown_timeout=600) as server:
        streaming, streams = in_thread(lambda: server.chat(stream=True))
        wait_until(lambda: server.engine.num_live == 1)
        server.stop()
        time.sleep(0.05)
        assert server.thread.is_alive()
        server.stop()
        server.thread.join(10)
        assert not server.thread.is_alive()
        streaming.join(10)
    assert streams[0].text.endswith("data: [DONE]\n\n")
    assert server.engine.num_live == 0


SCRIPT = """
    import asyncio, sys
    sys.path.insert(0, {folder!r})
    from server_helpers import FakeEngine, Sample
    from cardan.core.config.server import ServerConfig
    from cardan.server.run import serve
    from cardan.server.sockets import reserve_socket
    config = ServerConfig(port=0, shutdown_timeout={timeout})
    sock = reserve_socket(config)
    print(sock.getsockname()[1], flush=True)
    engine = FakeEngine(samples=[Sample.of("x" * 400)], delay=0.01)
    asyncio.run(serve(engine, config, sock))
    print("live", engine.num_live, "torch" in sys.modules, flush=True)
"""


@pytest.mark.parametrize(
    ("signals", "timeout"), [([signal.SIGTERM], 0.1), ([signal.SIGINT, signal.SIGINT], 600)]
)
def test_signals_end_the_process_with_success(signals, timeout):
    script = textwrap.dedent(SCRIPT).format(folder=str(Path(__file__).parent), timeout=timeout)
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        with process.stdout:
            url = f"http://127.0.0.1:{int(process.stdout.readline())}/v1/completions"
            body = {"prompt": "a", "stream": True, "max_tokens": 400}
            with httpx.stream("POST", url, json=body, timeout=20) as response:
                lines = response.iter_lines()
                next(lines)
                for number in signals:
                    process.send_signal(number)
                    time.sleep(0.05)
                rest = [line for line in lines if line]
            assert rest[-1] == "data: [DONE]"
            assert '"error"' in rest[-2]
            assert process.stdout.read().split() == ["live", "0", "False"]
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()
