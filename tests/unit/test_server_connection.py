"""Connections that are slow, greedy or broken, on raw sockets."""

import json
import socket
import time
from contextlib import contextmanager

import pytest
from server_helpers import FakeEngine, Sample, running, wait_until

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
BODY = json.dumps({"prompt": "Hi"}).encode()
REQUEST = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
GET = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


@contextmanager
def connected(server, receive_buffer=None):
    with socket.socket() as sock:
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.settimeout(20)
        sock.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
        yield sock


def read_all(sock) -> bytes:
    data = b""
    while part := sock.recv(65536):
        data += part
    return data


def is_cut_off(sock, data: bytes, times: int, pause: float = 0.0) -> bool:
    """Whether sending ``data`` again and again comes to an end."""
    try:
        for _ in range(times):
            sock.sendall(data)
            time.sleep(pause)
    except (ConnectionResetError, BrokenPipeError):
        return True
    return False


def error_of(answer: bytes) -> dict:
    return json.loads(answer.rpartition(b"\r\n\r\n")[2])["error"]


@pytest.mark.parametrize(
    "start",
    [b"GE", HEAD, HEAD + b"Content-Length: 20\r\n\r\n{", HEAD + b"Expect: 100-continue\r\n"],
)
def test_a_request_that_does_not_arrive_ends_with_408(start):
    with running(receive_timeout=0.2) as server, connected(server) as sock:
        sock.sendall(start)
        answer = read_all(sock)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert error_of(answer) == {
            "message": "the request did not arrive in time",
            "type": "RequestTimeoutError",
            "param": None,
            "code": 408,
        }


def test_dribbling_does_not_buy_time():
    with running(receive_timeout=0.3) as server, connected(server) as sock:
        sock.sendall(HEAD + b"Content-Length: 10000\r\n\r\n")
        assert is_cut_off(sock, b" ", 200, 0.05)


def test_a_body_at_a_fair_pace_may_take_longer_than_the_timeout():
    with running(receive_timeout=0.2) as server, connected(server) as sock:
        body = BODY + b" " * 4 * 4096
        sock.sendall(HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body))
        for start in range(0, len(body), 4096):
            sock.sendall(body[start : start + 4096])
            time.sleep(0.2)
        assert read_all(sock).startswith(b"HTTP/1.1 200 ")


def test_time_counts_for_a_second_request_too():
    with running(receive_timeout=0.2) as server, connected(server) as sock:
        sock.sendall(REQUEST + b"GET /ver")
        answers = read_all(sock)
        assert answers.startswith(b"HTTP/1.1 200 ")
        assert error_of(answers)["code"] == 408


def test_an_answer_may_take_longer_than_a_request():
    engine = FakeEngine(delay=0.1)
    with running(engine, receive_timeout=0.2) as server:
        assert server.complete().status_code == 200


def test_a_client_that_reads_nothing_is_cut_off():
    engine = FakeEngine([Sample.of("x" * 400)], chunk=lambda _i: 1)
    with running(engine, send_timeout=0.3) as server:
        with connected(server, receive_buffer=4096) as sock:
            body = json.dumps(
                {"prompt": ["Hi"] * 40, "max_tokens": 400, "stream": True, "logprobs": 20}
            ).encode()
            sock.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            wait_until(lambda: engine.num_live > 0)
            wait_until(lambda: engine.num_live == 0)
        assert server.http.get("/load").json()["server_load"] == 0


def test_a_client_that_left_is_noticed_whatever_it_sent_ahead():
    engine = FakeEngine([Sample.of("x" * 400)], delay=0.05)
    with running(engine) as server:
        with connected(server) as sock:
            sock.sendall(REQUEST)
            wait_until(lambda: engine.num_live == 1)
            sock.sendall(REQUEST)
            time.sleep(0.1)
        began = time.monotonic()
        wait_until(lambda: engine.num_live == 0)
        assert len(engine.requests) == 1, time.monotonic() - began


def test_requests_sent_ahead_are_answered_in_turn():
    with running() as server, connected(server) as sock:
        sock.sendall(REQUEST * 3 + GET)
        answers = read_all(sock)
        assert answers.count(b"HTTP/1.1 200 OK") == 4
        assert answers.endswith(b'"}')


def test_a_refused_body_is_read_so_that_the_refusal_is_seen():
    with running(max_body_bytes=1_000_000) as server, connected(server) as sock:
        body = b" " * 1_500_000
        sock.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body + GET)
        answers = read_all(sock)
        assert answers.startswith(b"HTTP/1.1 413 ")
        assert b"HTTP/1.1 200 OK" in answers


def test_a_refused_body_is_not_read_forever():
    with running(max_body_bytes=100_000) as server, connected(server) as sock:
        sock.sendall(HEAD + b"Content-Length: 100000000\r\n\r\n")
        assert is_cut_off(sock, b" " * 100_000, 1000)


def test_what_is_not_http_gets_an_error_in_the_usual_form():
    with running() as server, connected(server) as sock:
        sock.sendall(b"nonsense\r\n\r\n" + b"x" * 300_000)
        answer = read_all(sock)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert error_of(answer)["type"] == "BadRequestError"
        assert b"connection: close" in answer.lower()


def test_a_broken_chunk_after_the_answer_began_ends_the_connection():
    with running(max_body_bytes=10) as server, connected(server) as sock:
        sock.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n14\r\n" + b" " * 20 + b"\r\n")
        answer = sock.recv(65536)
        assert answer.startswith(b"HTTP/1.1 413 ")
        sock.sendall(b"zz\r\n")
        assert b"HTTP/1.1" not in read_all(sock)
        assert server.http.get("/ready").status_code == 200


def test_both_ways_to_say_where_a_body_ends_are_refused():
    with running() as server, connected(server) as sock:
        lengths = b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n"
        sock.sendall(HEAD + lengths + b"0\r\n\r\n" + GET)
        answers = read_all(sock)
        assert answers.startswith(b"HTTP/1.1 400 ")
        assert answers.count(b"HTTP/1.1 ") == 1


def test_whole_urls_are_paths_here():
    with running() as server, connected(server) as sock:
        sock.sendall(GET.replace(b"/version", b"http://elsewhere/version"))
        assert read_all(sock).startswith(b"HTTP/1.1 200 ")


def test_no_redirects():
    with running() as server:
        assert server.http.get("/version/").status_code == 404
