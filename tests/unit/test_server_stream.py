"""The streaming contract, point by point, and the official client on it."""

import asyncio
import itertools

import httpx
import openai
import pytest
from server_helpers import (
    FakeEngine,
    Sample,
    fold_chat,
    read_events,
    running,
    strict_json,
    wait_until,
)

from cardan.core.types.errors import EngineDeadError, InputError, QueueFullError, RequestFailedError
from cardan.server.sse import EventStream
from cardan.server.tracker import RequestTracker


@pytest.fixture(scope="module")
def shared():
    with running() as server:
        yield server


@pytest.fixture
def server(shared):
    fresh = FakeEngine()
    shared.engine.__dict__.update(fresh.__dict__)
    return shared


# -- the nine points ------------------------------------------------------------------------------


def test_events_of_a_chat_are_framed_and_headed_alike(server):
    response = server.chat(stream=True)
    events = read_events(response)
    assert response.headers["cache-control"] == "no-cache"
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    for name in ("id", "created", "model", "system_fingerprint"):
        assert len({event[name] for event in events}) == 1
    assert events[0]["id"].startswith("chatcmpl-")
    assert events[0]["model"] == "tiny"


def test_first_event_has_the_role_and_the_last_the_finish_reason(server):
    server.engine.samples = [Sample.of("Hé!", finish_reason="stop", stop_reason="!")]
    choices = [event["choices"][0] for event in read_events(server.chat(stream=True))]
    assert choices[0] == {
        "index": 0,
        "delta": {"role": "assistant", "content": ""},
        "logprobs": None,
        "finish_reason": None,
    }
    # Half of the é says nothing and is no event.
    assert [choice["delta"] for choice in choices[1:]] == [
        {"content": "H"},
        {"content": "é"},
        {"content": "!"},
    ]
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, "stop"]
    assert choices[-1]["stop_reason"] == "!"


def test_a_chunk_may_carry_only_logprobs_and_ids(server):
    server.engine.samples = [Sample.of("é")]
    events = read_events(server.chat(stream=True, logprobs=True, return_token_ids=True))
    half, rest = (event["choices"][0] for event in events[1:])
    assert half["delta"] == {}
    assert len(half["token_ids"]) == len(half["logprobs"]["content"]) == 1
    assert rest["delta"] == {"content": "é"}
    assert events[0]["prompt_token_ids"] == [ord(c) - 33 if c in "<>" else i for c, i in zip(
        "<user>Hi", events[0]["prompt_token_ids"], strict=True)]  # fmt: skip
    tokens = [half["logprobs"]["content"][0], rest["logprobs"]["content"][0]]
    assert bytes(tokens[0]["bytes"] + tokens[1]["bytes"]).decode() == "é"
    assert tokens[0]["token"] == "\\xc3"


@pytest.mark.parametrize("reason", ["stop", "length", "abort"])
def test_one_finish_reason_a_choice_and_nothing_after(server, reason):
    server.engine.samples = [Sample.of("abc", finish_reason=reason), Sample.of("a")]
    events = read_events(server.chat(stream=True, n=3))
    for index in range(3):
        reasons = [
            choice["finish_reason"]
            for event in events
            for choice in event["choices"]
            if choice["index"] == index
        ]
        assert reasons[:-1] == [None] * (len(reasons) - 1)
        assert reasons[-1] == ("stop" if index == 1 else reason)


def test_usage_options(server):
    server.engine.num_cached = 2
    plain = read_events(server.chat(stream=True))
    assert all("usage" not in event for event in plain)

    final = read_events(server.chat(stream=True, stream_options={"include_usage": True}))
    assert [event["usage"] for event in final[:-1]] == [None] * (len(final) - 1)
    assert final[-1]["choices"] == []
    assert final[-1]["usage"] == {
        "prompt_tokens": 8,
        "completion_tokens": 6,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }

    options = {"include_usage": True, "continuous_usage_stats": True}
    running_usage = read_events(server.chat(stream=True, stream_options=options))
    counts = [event["usage"]["completion_tokens"] for event in running_usage]
    assert counts == [1, 1, 2, 3, 4, 5, 6, 6]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InputError("bad", "seed"), 400),
        (QueueFullError("full"), 503),
        (EngineDeadError("dead"), 503),
        (RequestFailedError("NaN logits"), 500),
        (RuntimeError("secret /path"), 500),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_before_the_first_token_are_http_errors(server, error, status, stream):
    server.engine.error_before = error
    response = server.chat(stream=stream)
    assert response.status_code == status
    body = strict_json(response.text)["error"]
    assert set(body) == {"message", "type", "param", "code"}
    assert body["code"] == status
    assert "secret" not in response.text
    assert ("retry-after" in response.headers) == (status == 503)


@pytest.mark.parametrize("path", ["chat", "complete"])
def test_an_error_in_the_stream_is_an_event_and_done_comes_last(server, path):
    server.engine.error_after = (1, RequestFailedError("the logits held NaN"))
    events = read_events(getattr(server, path)(stream=True))
    assert events[-1] == {
        "error": {
            "message": "the logits held NaN",
            "type": "InternalServerError",
            "param": None,
            "code": 500,
        }
    }
    assert all("choices" in event for event in events[:-1])
    unstreamed = getattr(server, path)()
    assert unstreamed.status_code == 500


def test_a_sample_that_ends_in_error_fails_the_request(server):
    server.engine.samples = [Sample.of("ab", finish_reason="error")]
    assert server.chat().status_code == 500
    assert "error" in read_events(server.chat(stream=True))[-1]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("point", ["before the first token", "between tokens"])
def test_generation_ends_when_the_client_leaves(server, path, stream, point):
    server.engine.samples = [Sample.of("x" * 400)]
    server.engine.delay = 60 if point == "before the first token" else 0.01
    body = {"stream": stream, "max_tokens": 400}
    body |= {"prompt": ["a", "b"]} if "chat" not in path else {
        "messages": [{"role": "user", "content": "a"}]
    }  # fmt: skip
    expected = 1 if "chat" in path else 2
    client = httpx.Client(base_url=server.url)
    timeout = httpx.Timeout(0.15)
    if stream and point == "between tokens":
        with client.stream("POST", path, json=body) as response:
            next(response.iter_lines())
    else:
        with pytest.raises(httpx.ReadTimeout):
            client.post(path, json=body, timeout=timeout)
    client.close()
    wait_until(lambda: len(server.engine.aborted) == expected)
    wait_until(lambda: server.http.get("/load").json()["server_load"] == 0)
    assert server.engine.num_live == 0


def test_samples_interleave_and_their_deltas_make_the_unstreamed_texts(server):
    server.engine.samples = [Sample.of("one"), Sample.of("second"), Sample.of("3")]
    events = read_events(server.chat(stream=True, n=3, seed=1, temperature=0))
    indices = [choice["index"] for event in events for choice in event["choices"]]
    assert [index for index, _group in itertools.groupby(indices[3:])][:4] == [0, 1, 2, 0]
    assert indices[:3] == [0, 1, 2]
    texts = fold_chat(events)["choices"]
    assert [texts[i]["content"] for i in range(3)] == ["one", "second", "3"]
    whole = server.chat(n=3, seed=1, temperature=0).json()
    assert [choice["message"]["content"] for choice in whole["choices"]] == ["one", "second", "3"]


def test_keep_alive_comments_fill_a_silence():
    sent = []

    async def send(message):
        sent.append(message.get("body", b""))

    async def receive():
        await asyncio.Event().wait()

    async def events(_engine_id):
        yield b"data: 1\n\n"
        await asyncio.sleep(0.2)
        yield b"data: 2\n\n"

    async def main():
        stream = EventStream(events, RequestTracker().track("a"), {}, keep_alive=0.05)
        await stream({"type": "http"}, receive, send)

    asyncio.run(main())
    body = b"".join(sent)
    assert body.startswith(b"data: 1\n\n: keep-alive\n\n")
    assert body.endswith(b"data: 2\n\ndata: [DONE]\n\n")


# -- the official client --------------------------------------------------------------------------


def test_openai_client(server):
    server.engine.samples = [Sample.of("Hello there")]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        messages = [{"role": "user", "content": "Hi"}]
        answer = client.chat.completions.create(
            model="tiny", messages=messages, logprobs=True, top_logprobs=2
        )
        assert answer.choices[0].message.content == "Hello there"
        assert answer.choices[0].logprobs.content[0].top_logprobs[0].logprob == -1.0
        assert answer.usage.completion_tokens_details.reasoning_tokens == 0

        stream = client.chat.completions.create(
            model="tiny", messages=messages, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == "Hello there"
        assert chunks[-1].usage == answer.usage

        completion = client.completions.create(model="tiny", prompt=["a", "b"], logprobs=1, n=2)
        assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
        assert completion.choices[0].text == "Hello there"
        pieces = client.completions.create(model="tiny", prompt="a", stream=True)
        assert "".join(piece.choices[0].text for piece in pieces) == "Hello there"

        assert [model.id for model in client.models.list()] == ["tiny"]
        assert client.models.retrieve("tiny").id == "tiny"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("other")
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="tiny", messages=messages, temperature=3)
        assert caught.value.param == "temperature"

        server.engine.error_after = (2, RequestFailedError("NaN"))
        with pytest.raises(openai.APIError, match="NaN"):
            list(client.chat.completions.create(model="tiny", messages=messages, stream=True))
