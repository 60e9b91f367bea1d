"""The server on the real front of the engine; only the engine behind it is a script."""

import threading
import time

import httpx
import pytest
from server_helpers import INFO, TOKENIZER, RunningServer, fold_chat, read_events, wait_until

from cardan.core.config.server import ServerConfig
from cardan.core.engine.async_engine import AsyncEngine
from cardan.core.text.preprocess import Preprocessor
from cardan.core.types.engine_info import EngineHealth
from cardan.core.types.outputs import EngineStats, Finish, Started, StepOutputs, TokenLogprobs
from cardan.core.types.request import FinishReason

ANSWER = TOKENIZER.encode("Good dáy! And so on", False)


def entry(token_id):
    return TokenLogprobs([token_id, 5, 6], [-0.5, -1.0, -2.0], [1, 2, 3])


class ScriptedClient:
    """Says ``ANSWER`` to every request, one token a step, on a thread of its own."""

    info = INFO
    sleep_level = 0
    delay = 0.001

    def __init__(self):
        self.aborted = []
        self.sink = None

    def connect(self, sink):
        self.sink = sink

    def submit(self, request):
        threading.Thread(target=self._work, args=(request,)).start()

    def abort(self, keys):
        self.aborted += keys

    def reset_prefix_cache(self):
        pass

    def health(self):
        return EngineHealth("ready")

    def close(self):
        pass

    def _work(self, request):
        keys = range(request.key, request.key + request.num_sequences)
        first = StepOutputs(started={key: Started(1, time.monotonic()) for key in keys})
        if request.params.prompt_logprobs is not None:
            tables = [entry(token_id) for token_id in request.prompt_token_ids[1:]]
            first.prompt_logprobs = {request.key: tables}
        if request.max_tokens == 0:
            first.finished = {key: Finish(FinishReason.LENGTH) for key in keys}
        self.sink.on_outputs(first)
        limit = min(request.max_tokens, len(ANSWER))
        for place, token_id in enumerate(ANSWER[:limit]):
            time.sleep(self.delay)
            live = [key for key in keys if key not in self.aborted]
            if not live:
                return
            outputs = StepOutputs(keys=live, token_ids=[token_id] * len(live))
            outputs.stats = EngineStats(num_running=len(live), num_steps=1, num_batched_tokens=1)
            if request.params.logprobs is not None:
                outputs.logprobs = {key: [entry(token_id)] for key in live}
            if place == limit - 1:
                outputs.finished = {key: Finish(FinishReason.LENGTH) for key in live}
            self.sink.on_outputs(outputs)


class LazyEngine:
    """Makes the engine on the server's loop, where its first attribute is asked for."""

    def __init__(self, client):
        self.client = client
        self._engine = None

    def __getattr__(self, name):
        if self._engine is None:
            preprocessor = Preprocessor(TOKENIZER, INFO)
            self._engine = AsyncEngine(self.client, TOKENIZER, preprocessor)
        return getattr(self._engine, name)


@pytest.fixture(scope="module")
def server():
    server = RunningServer(LazyEngine(ScriptedClient()), ServerConfig(port=0))
    yield server
    server.close()


def test_chat_streamed_and_whole(server):
    fields = {"n": 2, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    whole = server.chat(**fields).json()
    events = read_events(server.chat(**fields, stream=True, stream_options={"include_usage": True}))
    folded = fold_chat(events)
    assert folded["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] == 2 * len(ANSWER)
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 1
    for choice in whole["choices"]:
        other = folded["choices"][choice["index"]]
        assert choice["message"]["content"] == other["content"] == "Good dáy! And so on"
        assert choice["logprobs"]["content"] == other["logprobs"]
        assert choice["token_ids"] == other["token_ids"] == ANSWER


def test_stop_string(server):
    for stream in (False, True):
        response = server.chat(stop=["! A"], stream=stream)
        if stream:
            choice = fold_chat(read_events(response))["choices"][0]
            text = choice["content"]
        else:
            choice = response.json()["choices"][0]
            text = choice["message"]["content"]
        assert text == "Good dáy"
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "! A")


def test_echo_with_logprobs_and_offsets(server):
    choice = server.complete(prompt="Hé", echo=True, logprobs=1, max_tokens=8).json()["choices"][0]
    assert choice["text"] == "HéGood dá"
    logprobs = choice["logprobs"]
    assert logprobs["text_offset"] == [0, 1, 1, 2, 3, 4, 5, 6, 7, 8, 8][: len(logprobs["tokens"])]
    scored = server.complete(prompt="Hé", echo=True, logprobs=1, max_tokens=0).json()
    assert scored["choices"][0]["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    assert scored["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "a" * 600}, "prompt"),
        ({"prompt": "a", "max_tokens": 600}, "max_tokens"),
        ({"prompt": [259, 260]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"allowed_token_ids": [999]}, "allowed_token_ids"),
        ({"logit_bias": {"999": 1}}, "logit_bias"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_the_engines_own_checks_are_400(server, fields, param, stream):
    response = server.complete(**fields, stream=stream)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_tokenize_renders_the_template(server):
    body = {"messages": [{"role": "user", "content": "é"}]}
    ids = server.post("/tokenize", body).json()["tokens"]
    assert ids == TOKENIZER.encode("<user>é", False)
    assert server.post("/detokenize", {"tokens": ids}).json()["prompt"] == "<user>é"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts_all_samples(server, stream, monkeypatch):
    client = server.engine.client
    client.aborted.clear()
    monkeypatch.setattr(ScriptedClient, "delay", 0.2)
    body = {"prompt": ["a", "b"], "n": 2, "stream": stream}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=0.3)
    wait_until(lambda: len(client.aborted) == 4)
    wait_until(lambda: server.engine.num_live == 0)
