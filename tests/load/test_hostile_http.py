"""Bytes that are no proper HTTP, or proper and meant to harm: the server answers 4xx or closes,
logs nothing that it did not mean to, and serves the next client as before.
"""

import asyncio
import gzip
import itertools
import json
import re
import ssl

import pytest
from clients import Address, connect, post
from load_server import check_log, idle_footprint, known_answer
from server_process import Server

pytestmark = [pytest.mark.model, pytest.mark.slow]

PING = {"prompt": "Hi", "max_tokens": 1}
BODY = json.dumps(PING).encode()
COMPLETIONS = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
CLOSE = b"Connection: close\r\n\r\n"
GET = b"GET /version HTTP/1.1\r\nHost: x\r\n"


def exchange(server: Server, *parts: bytes, half_close: bool = True) -> list[tuple[int, bytes]]:
    """Status and rest of each answer to raw bytes. Nothing more is sent after them."""

    async def run() -> bytes:
        data = b""
        async with connect(Address.of(server.url)) as peer:
            for part in parts:
                await peer.send(part)
                await asyncio.sleep(0.02)
            data = await asyncio.wait_for(_read(peer), 20)
        return data

    async def _read(peer) -> bytes:
        data = b""
        try:
            while part := await peer.read():
                data += part
        except ConnectionResetError:
            pass
        return data

    return split_answers(asyncio.run(run()))


def split_answers(data: bytes) -> list[tuple[int, bytes]]:
    assert not data or data.startswith(b"HTTP/1.1 "), data[:100]
    starts = [match.start() for match in re.finditer(rb"HTTP/1\.1 \d{3} ", data)]
    pieces = [data[start:end] for start, end in itertools.pairwise([*starts, len(data)])]
    return [(int(piece[9:12]), piece) for piece in pieces]


def body_of(answer: bytes) -> dict:
    return json.loads(answer.partition(b"\r\n\r\n")[2])


def chunked(*chunks: bytes) -> bytes:
    return b"Transfer-Encoding: chunked\r\n" + CLOSE + b"".join(chunks)


REFUSED = {
    # two readings of where a body ends: the door of request smuggling
    "TE and CL": COMPLETIONS + LENGTH + chunked(b"%x\r\n" % len(BODY), BODY, b"\r\n0\r\n\r\n"),
    "two lengths": COMPLETIONS + LENGTH + b"Content-Length: 5\r\n" + CLOSE + BODY,
    "list of lengths": COMPLETIONS + b"Content-Length: 5, 6\r\n" + CLOSE + BODY,
    "signed length": COMPLETIONS + b"Content-Length: +5\r\n" + CLOSE + BODY,
    "negative length": COMPLETIONS + b"Content-Length: -5\r\n" + CLOSE + BODY,
    "hex length": COMPLETIONS + b"Content-Length: 0x10\r\n" + CLOSE + BODY,
    "huge length": COMPLETIONS + b"Content-Length: " + b"9" * 30 + b"\r\n" + CLOSE + BODY,
    "TE identity": COMPLETIONS + b"Transfer-Encoding: identity\r\n" + CLOSE + BODY,
    "TE twice": COMPLETIONS + b"Transfer-Encoding: chunked, chunked\r\n" + CLOSE + b"0\r\n\r\n",
    "TE gzip": COMPLETIONS + b"Transfer-Encoding: gzip, chunked\r\n" + CLOSE + b"0\r\n\r\n",
    "TE with a space": COMPLETIONS + b"Transfer-Encoding : chunked\r\n" + CLOSE + b"0\r\n\r\n",
    "TE vertical tab": COMPLETIONS + b"Transfer-Encoding: \x0bchunked\r\n" + CLOSE + b"0\r\n\r\n",
    "chunk of bad hex": COMPLETIONS + chunked(b"zz\r\n", BODY, b"\r\n0\r\n\r\n"),
    "negative chunk": COMPLETIONS + chunked(b"-5\r\n", BODY, b"\r\n0\r\n\r\n"),
    "huge chunk": COMPLETIONS + chunked(b"f" * 40 + b"\r\n", BODY),
    "chunk too long": COMPLETIONS + chunked(b"2\r\n", BODY, b"\r\n0\r\n\r\n"),
    "chunk extension of 100 kB": COMPLETIONS + chunked(b"5;", b"x" * 100_000),
    "space before the colon": GET + b"X-A : 1\r\n" + CLOSE,
    "NUL in a header": GET + b"X-A: a\x00b\r\n" + CLOSE,
    "CR in a header": GET + b"X-A: a\rb\r\n" + CLOSE,
    "header without a colon": GET + b"nonsense\r\n" + CLOSE,
    "empty header name": GET + b": 1\r\n" + CLOSE,
    "header of 200 kB": GET + b"X-A: " + b"a" * 200_000 + b"\r\n" + CLOSE,
    "30,000 headers": GET + b"".join(b"X-%d: 1\r\n" % n for n in range(30_000)) + CLOSE,
    "target of 200 kB": b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: x\r\n" + CLOSE,
    "no host": b"GET /version HTTP/1.1\r\n" + CLOSE,
    "two hosts": GET + b"Host: y\r\n" + CLOSE,
    "no version": b"GET /version\r\n\r\n",
    "version 3": b"GET /version HTTP/3.0\r\nHost: x\r\n" + CLOSE,
    "version 1.9": b"GET /version HTTP/x.y\r\nHost: x\r\n" + CLOSE,
    "space in the target": b"GET /ver sion HTTP/1.1\r\nHost: x\r\n" + CLOSE,
    "raw bytes in the target": b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n" + CLOSE,
    "escape codes in the method": b"\x1b[31mGET /version HTTP/1.1\r\nHost: x\r\n" + CLOSE,
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "NULs": bytes(2000),
    "another protocol": b"\x05\x01\x00\r\n\r\n",
    "no JSON type": COMPLETIONS.replace(b"application/json", b"text/plain") + LENGTH + CLOSE + BODY,
    "form": COMPLETIONS.replace(b"application/json", b"multipart/form-data")
    + LENGTH
    + CLOSE
    + BODY,
    "gzip": COMPLETIONS
    + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n" % len(gzip.compress(BODY))
    + CLOSE
    + gzip.compress(BODY),
    "gzip bomb": COMPLETIONS
    + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n" % len(gzip.compress(bytes(10**7)))
    + CLOSE
    + gzip.compress(bytes(10**7)),
    "traversal": b"GET /v1/models/../../../../etc/passwd HTTP/1.1\r\nHost: x\r\n" + CLOSE,
    "escaped traversal": b"GET /%2e%2e/%2e%2e/etc/passwd HTTP/1.1\r\nHost: x\r\n" + CLOSE,
    "escaped NUL": b"GET /v1/models/%00%0d%0a%1b[31m HTTP/1.1\r\nHost: x\r\n" + CLOSE,
    "broken escape": b"GET /%zz%f HTTP/1.1\r\nHost: x\r\n" + CLOSE,
    "escaped surrogate": b"GET /v1/models/%ed%a0%80 HTTP/1.1\r\nHost: x\r\n" + CLOSE,
    "asterisk": b"GET * HTTP/1.1\r\nHost: x\r\n" + CLOSE,
    "CONNECT": b"CONNECT example.org:443 HTTP/1.1\r\nHost: x\r\n" + CLOSE,
    "TRACE": b"TRACE /version HTTP/1.1\r\nHost: x\r\n" + CLOSE,
    "a made-up method": b"BREW /version HTTP/1.1\r\nHost: x\r\n" + CLOSE,
    "a long method": b"A" * 5000 + b" /version HTTP/1.1\r\nHost: x\r\n" + CLOSE,
    "lower-case method": b"post /v1/completions HTTP/1.1\r\nHost: x\r\n" + CLOSE,
    "GET of a POST route": b"GET /v1/completions HTTP/1.1\r\nHost: x\r\n" + CLOSE,
    "HEAD of a POST route": b"HEAD /v1/completions HTTP/1.1\r\nHost: x\r\n" + CLOSE,
    "OPTIONS": b"OPTIONS /v1/completions HTTP/1.1\r\nHost: x\r\n" + CLOSE,
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(server: Server, name: str) -> None:
    answers = exchange(server, REFUSED[name])
    for status, answer in answers:
        assert 400 <= status < 500, answer[:300]
        if not REFUSED[name].startswith(b"HEAD"):
            error = body_of(answer)["error"]
            assert error["message"]
            assert error["code"] == status
    # Whatever came after the fault is not taken for another request.
    assert len(answers) == 1, answers
    assert server.get("/ready").status_code == 200


SERVED = {
    "plain": COMPLETIONS + LENGTH + CLOSE + BODY,
    "chunks of a byte": COMPLETIONS
    + chunked(*(b"1\r\n%c\r\n" % byte for byte in BODY), b"0\r\n\r\n"),
    "chunk extensions and trailers": COMPLETIONS
    + chunked(b"%x;a=b\r\n" % len(BODY), BODY, b"\r\n0\r\nX-Trailer: 1\r\n\r\n"),
    "bare line feeds": (COMPLETIONS + LENGTH + CLOSE).replace(b"\r\n", b"\n") + BODY,
    "folded header": COMPLETIONS + b"X-A: 1\r\n\t2\r\n" + LENGTH + CLOSE + BODY,
    "equal lengths": COMPLETIONS + LENGTH + LENGTH + CLOSE + BODY,
    "expects 100": COMPLETIONS + LENGTH + b"Expect: 100-continue\r\n" + CLOSE + BODY,
    "HTTP/1.0": COMPLETIONS.replace(b"HTTP/1.1", b"HTTP/1.0") + LENGTH + b"\r\n" + BODY,
    "HTTP/1.0 without host": b"GET /version HTTP/1.0\r\n\r\n",
    "absolute target": b"GET http://elsewhere/version HTTP/1.1\r\nHost: x\r\n" + CLOSE,
    "escaped path": b"GET /%76ersion HTTP/1.1\r\nHost: x\r\n" + CLOSE,
    "query": b"GET /version?" + b"a=1&" * 2000 + b" HTTP/1.1\r\nHost: x\r\n" + CLOSE,
    "strange host": b"GET /version HTTP/1.1\r\nHost: a:b:c/@<>\r\n" + CLOSE,
    "upgrade to websocket": GET + b"Connection: upgrade\r\nUpgrade: websocket\r\n" + CLOSE,
    "upgrade to h2c": GET + b"Connection: upgrade, close\r\nUpgrade: h2c\r\n\r\n",
    "authorization": GET + b"Authorization: Basic \xff\xfe\r\nAuthorization: Bearer\r\n" + CLOSE,
    "raw bytes in a header": GET + b"X-A: \xff\x80\r\n" + CLOSE,
    "many headers": GET + b"".join(b"X-%d: 1\r\n" % n for n in range(500)) + CLOSE,
    "HEAD": b"HEAD /version HTTP/1.1\r\nHost: x\r\n" + CLOSE,
    "body of a GET": GET + LENGTH + CLOSE + BODY,
    "range": GET + b"Range: bytes=0-99999999\r\n" + CLOSE,
}


@pytest.mark.parametrize("name", SERVED)
def test_served(server: Server, name: str) -> None:
    answers = [item for item in exchange(server, SERVED[name]) if item[0] != 100]
    assert [status for status, _answer in answers] == [200], answers


def test_a_refusal_may_come_before_the_body_is_read(server: Server) -> None:
    """The rest must not be taken for a request; what follows it is one."""
    smuggled = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: text/plain\r\n"
    rest = smuggled + b"x" * (100_000 - len(smuggled))
    sent = head + b"Content-Length: 100000\r\n\r\n"
    answers = exchange(server, sent, rest, GET + CLOSE)
    assert [status for status, _answer in answers] == [415, 200]


@pytest.mark.parametrize(
    "given",
    [b"a\x1b[31mb", b"x" * 129, b"\xc3\xa9", b"", b"a b", b"\t", b"%0d%0aX-Evil:1", b"{}\"'<>&"],
)
def test_request_ids_come_back_only_when_harmless(server: Server, given: bytes) -> None:
    [(status, answer)] = exchange(server, GET + b"X-Request-Id: " + given + b"\r\n" + CLOSE)
    assert status in (200, 400)
    head = answer.partition(b"\r\n\r\n")[0].lower()
    assert b"x-evil:" not in head.replace(b"x-request-id: " + given.lower(), b"")
    if status == 200:
        assert (b"x-request-id: " + given.lower() + b"\r\n" in head + b"\r\n") == (
            given in (b"%0d%0aX-Evil:1", b"{}\"'<>&")
        )


def test_a_request_id_cannot_add_a_header(server: Server) -> None:
    injected = b"X-Request-Id: a\r\nX-Evil: 1\r\n"
    [(status, answer)] = exchange(server, GET + injected + CLOSE)
    assert status == 200
    assert b"x-evil" not in answer.lower()


def test_tls_on_the_plain_port(server: Server) -> None:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    hello = ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname="x")
    with pytest.raises(ssl.SSLWantReadError):
        hello.do_handshake()
    answers = exchange(server, outgoing.read())
    assert [status for status, _answer in answers] == [400]


def test_a_trailing_slash_does_not_lead_elsewhere(server: Server) -> None:
    """A redirect that repeats the Host header is an open door for phishing."""
    for target in (b"/v1/models/?", b"/version/", b"//version", b"//elsewhere.example/version/"):
        request = b"GET " + target + b" HTTP/1.1\r\nHost: elsewhere.example\r\n" + CLOSE
        [(status, answer)] = exchange(server, request)
        assert status in (200, 404), answer
        assert b"location" not in answer.lower()


def test_many_slow_clients_hold_nobody_up(server: Server) -> None:
    """Two hundred connections that dribble headers and bodies while others are served."""

    async def dribble(data: bytes, until: asyncio.Event) -> None:
        async with connect(Address.of(server.url)) as peer:
            for byte in data:
                await peer.send(bytes([byte]))
                try:
                    await asyncio.wait_for(until.wait(), 0.1)
                    return
                except TimeoutError:
                    continue

    async def run() -> list[int]:
        until = asyncio.Event()
        long = post("/v1/completions", PING, "X-Pad: " + "a" * 1000)
        body_first = post("/v1/completions", {**PING, "user": "a" * 1000})
        async with asyncio.TaskGroup() as group:
            for _ in range(100):
                group.create_task(dribble(long, until))
                group.create_task(dribble(body_first, until))
            statuses = []
            for _ in range(10):
                response = await asyncio.to_thread(server.get, "/ready")
                statuses.append(response.status_code)
                await asyncio.sleep(0.1)
            until.set()
        return statuses

    assert asyncio.run(run()) == [200] * 10


def test_after_all_this(server: Server) -> None:
    first = known_answer(server)
    idle_footprint(server)
    assert known_answer(server) == first
    check_log(server)
