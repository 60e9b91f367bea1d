"""The streaming client against answers written by hand, byte by byte."""

import asyncio
import errno
import itertools
import json
import re
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("aiohttp")

from cardan.bench.client import Client, ServerAddress
from cardan.bench.record import RequestRecord
from cardan.bench.sse import EventParser
from cardan.core.types.errors import ConfigError

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def event(content):
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def text_chunk(text, finish_reason=None, **more):
    return event({"choices": [{"text": text, "finish_reason": finish_reason, **more}]})


def delta_chunk(finish_reason=None, **delta):
    return event({"choices": [{"delta": delta, "finish_reason": finish_reason}]})


def usage(prompt_tokens, completion_tokens):
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}


def usage_chunk(prompt_tokens, completion_tokens):
    return event({"choices": [], "usage": usage(prompt_tokens, completion_tokens)})


class Scripted:
    """A server that sends the same pieces to everyone and remembers what it was asked."""

    def __init__(self, pieces, hold=False):
        self.pieces = pieces
        self.hold = hold  # keep the connection open after the pieces
        self.requests = []

    async def __call__(self, reader, writer):
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = re.search(r"content-length: (\d+)", head, re.IGNORECASE)
            body = await reader.readexactly(int(length[1])) if length else b""
            self.requests.append((head, body))
            for piece in self.pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.002)
            if self.hold:
                await reader.read()
        finally:
            writer.close()


def ask(pieces, *, endpoint="completions", timeout=20.0, hold=False, keep_text=True):
    """Record, client and server of one request."""

    async def run():
        script = Scripted(pieces, hold)
        server = await asyncio.start_server(script, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        address = ServerAddress(base_url=url, endpoint=endpoint, headers={"X-Mine": "1"})
        record = RequestRecord(0, 0.0, 0.0)
        async with server, Client(address, timeout, keep_text) as client:
            await client.send(b"{}", record, asyncio.get_running_loop().time())
        return record, client, script

    return asyncio.run(run())


def test_a_completion():
    pieces = [HEAD, text_chunk("Hel"), text_chunk("lo"), text_chunk("!", "length")]
    record, client, script = ask([*pieces, usage_chunk(5, 3), DONE])
    assert record.error is None
    assert record.status == 200
    assert record.text == "Hello!"
    assert (record.prompt_tokens, record.output_tokens) == (5, 3)
    assert record.chunk_tokens == [1, 1, 1]
    assert record.first_token == record.token_times[0]
    assert record.sent <= record.first_token < record.token_times[-1] == record.end
    assert record.token_times == sorted(record.token_times)
    assert client.num_without_usage == 0
    [(head, body)] = script.requests
    assert head.startswith("POST /v1/completions HTTP/1.1")
    assert "X-Mine: 1" in head
    assert body == b"{}"


def test_a_chat_answer_counts_what_a_reader_sees():
    """A chunk that only opens or only ends the answer brings no token."""
    pieces = [
        HEAD,
        delta_chunk(role="assistant", content=""),
        delta_chunk(reasoning_content="hm"),
        delta_chunk(content="yes"),
        delta_chunk(tool_calls=[{"index": 0}]),
        delta_chunk("stop"),
        usage_chunk(9, 3),
        DONE,
    ]
    record, _, script = ask(pieces, endpoint="chat")
    assert record.error is None
    assert record.text == "hmyes"
    assert len(record.token_times) == 3
    assert record.end > record.token_times[-1]  # the answer ends with its finish reason
    assert script.requests[0][0].startswith("POST /v1/chat/completions ")


def test_token_ids_and_running_usage_tell_how_many_tokens_a_chunk_has():
    pieces = [HEAD, text_chunk("ab", token_ids=[1, 2]), text_chunk("", token_ids=[3]), DONE]
    record, client, _ = ask(pieces)
    assert record.chunk_tokens == [2, 1]
    assert record.output_tokens == 3
    assert client.num_without_usage == 1
    growing = [event({"choices": [{"text": "x"}], "usage": usage(4, count)}) for count in (1, 4, 6)]
    record, client, _ = ask([HEAD, *growing, DONE])
    assert record.chunk_tokens == [1, 3, 2]
    assert (record.prompt_tokens, record.output_tokens) == (4, 6)
    assert client.num_without_usage == 0


def test_chunks_cut_anywhere():
    whole = text_chunk("é🙂") + text_chunk("ü", "stop") + usage_chunk(1, 2) + DONE
    for size in (1, 2, 3, 7, 1000):
        pieces = [whole[begin : begin + size] for begin in range(0, len(whole), size)]
        record, _, _ = ask([HEAD, *pieces])
        assert (record.error, record.text, record.output_tokens) == (None, "é🙂ü", 2)


def test_texts_are_kept_only_if_asked_for():
    record, _, _ = ask([HEAD, text_chunk("secret", "stop"), DONE], keep_text=False)
    assert record.text == ""
    assert record.output_tokens == 1


def http(status, body, kind="application/json"):
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return [head.encode() + body]


@pytest.mark.parametrize(
    ("pieces", "error", "status"),
    [
        (
            http("400 Bad Request", b'{"error": {"message": "prompt is\\ntoo long"}}'),
            "HTTP 400: prompt is too long",
            400,
        ),
        (http("429 Too Many", b'{"detail": "slow down"}'), "HTTP 429: .*slow down", 429),
        (http("502 Bad Gateway", b"<html>no</html>", "text/html"), "HTTP 502: <html>no", 502),
        (http("200 OK", b'{"choices": []}'), "not streamed: ", 200),
        ([HEAD, text_chunk("a"), event({"error": {"message": "died"}}), DONE], "died$", 200),
        ([HEAD, text_chunk("a"), b"data: {oops\n\n", DONE], "bad event: ", 200),
        ([HEAD, text_chunk("a"), b'data: {"choices": 3}\n\n', DONE], "bad event: ", 200),
        ([HEAD, text_chunk("a")], "truncated: ", 200),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n"], "connection: ", None),
        ([], "connection: ServerDisconnected", None),
        ([HEAD.replace(b"Connection: close", b"Content-Length: 99"), b"data"], "connection: ", 200),
    ],
)
def test_failures_are_written_to_the_record(pieces, error, status):
    record, client, _ = ask(pieces)
    assert re.match(f"(.*: )?{error}", record.error)
    assert "\n" not in record.error
    assert record.status == status
    assert record.end > 0
    assert client.num_without_usage == 0


def test_a_finish_reason_ends_an_answer_without_done():
    record, _, _ = ask([HEAD, text_chunk("a", "stop")])
    assert record.error is None


def test_a_timeout_keeps_what_came():
    record, _, _ = ask([HEAD, text_chunk("a")], timeout=0.6, hold=True)
    assert record.error == "timeout: no complete answer within 0.6 s"
    assert len(record.token_times) == 1
    assert record.output_tokens == 1
    assert record.end >= 0.6


def test_nobody_listens():
    async def run():
        address = ServerAddress(base_url="http://127.0.0.1:1", endpoint="chat", headers={})
        record = RequestRecord(0, 0.0, 0.0)
        async with Client(address, 5.0) as client:
            await client.send(b"{}", record, 0.0)
        return record

    record = asyncio.run(run())
    assert record.error.startswith("connection: ")
    assert record.status is None


def test_too_few_file_descriptors_have_a_remedy(monkeypatch):
    """More requests at once than the process may open connections."""

    loop = asyncio.new_event_loop()  # needs sockets of its own

    def refuse(*_arguments, **_more):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket, "socket", refuse)

    async def run():
        address = ServerAddress(base_url="http://127.0.0.1:1", endpoint="chat", headers={})
        record = RequestRecord(0, 0.0, 0.0)
        async with Client(address, 5.0) as client:
            await client.send(b"{}", record, 0.0)
        return record.error

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        error = runner.run(run())
    assert error.startswith("connection: ")
    assert "Too many open files" in error
    assert "ulimit -n" in error


def models(pieces, base="http://{}"):
    async def run():
        script = Scripted(pieces)
        server = await asyncio.start_server(script, "127.0.0.1", 0)
        host = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        address = ServerAddress(base_url=base.format(host), endpoint="chat", headers={})
        async with server, Client(address, 5.0) as client:
            return await client.models(), script.requests[0][0]

    return asyncio.run(run())


@pytest.mark.parametrize("base", ["http://{}", "http://{}/", "http://{}/v1", "http://{}/v1/"])
def test_models_are_asked_for(base):
    found, head = models(http("200 OK", b'{"data": [{"id": "a"}, {"id": "b"}]}'), base)
    assert found == ["a", "b"]
    assert head.startswith("GET /v1/models ")


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        (http("401 Unauthorized", b'{"error": {"message": "who?"}}'), "HTTP 401 who.*--api-key"),
        (http("200 OK", b'{"data": []}'), "lists no models; name the --model"),
        (http("200 OK", b"[1]"), "lists no models"),
        ([], "no server answers at"),
    ],
)
def test_servers_that_name_no_model(pieces, message):
    with pytest.raises(ConfigError, match=message):
        models(pieces)


def test_an_address_needs_a_scheme():
    address = ServerAddress(base_url="localhost:8000", endpoint="chat", headers={})
    with pytest.raises(ConfigError, match="base_url 'localhost:8000' must begin with http://"):
        Client(address, 1.0)


LINES = st.lists(st.sampled_from([b"", b"x", b" y: z", b"[DONE]", "é".encode()]), min_size=1)
ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])


@given(
    events=st.lists(LINES, min_size=1, max_size=5),
    end=ENDS,
    noise=st.sampled_from([b"", b": keep-alive", b"id: 3", b"event", b"dataset: 1"]),
    mark=st.sampled_from([b"", b"\xef\xbb\xbf"]),
    cuts=st.lists(st.integers(0, 400)),
)
def test_events_do_not_depend_on_where_bytes_are_cut(events, end, noise, mark, cuts):
    stream = mark
    for lines in events:
        stream += (noise + end if noise else b"") + b"".join(b"data: " + x + end for x in lines)
        stream += end
    stream += b":" + end  # a carriage return alone waits for what follows it
    places = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    parser, found = EventParser(), []
    for begin, stop in itertools.pairwise(places):
        found += parser.feed(stream[begin:stop])
    assert found == [b"\n".join(lines) for lines in events]


def test_an_unfinished_event_is_not_given_out():
    parser = EventParser()
    assert parser.feed(b"data: a\n") == []
    assert parser.feed(b"data:b\n\ndata: c") == [b"a\nb"]
    assert parser.feed(b"\n") == []
