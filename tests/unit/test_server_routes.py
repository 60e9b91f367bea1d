"""Answers of every route besides streaming: shapes, log-probabilities, tokens, health, access."""

import logging
from dataclasses import replace

import pytest
from server_helpers import BEGIN, END, FakeEngine, Sample, read_events, running, strict_json

from cardan.core.types.engine_info import EngineHealth, PluginReport, running_health
from cardan.core.types.prompt import TokenPrompt


@pytest.fixture(scope="module")
def shared():
    with running(served_model_names=("small", "org/alias"), enable_log_requests=True) as server:
        yield server


@pytest.fixture
def server(shared):
    shared.engine.__dict__.update(FakeEngine().__dict__)
    return shared


# -- answers --------------------------------------------------------------------------------------


def test_chat_answer(server):
    answer = server.chat(model="org/alias").json()
    assert answer.pop("id").startswith("chatcmpl-")
    assert answer.pop("created") > 1_700_000_000
    assert answer.pop("system_fingerprint").startswith("cardan-")
    assert answer == {
        "object": "chat.completion",
        "model": "small",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "Hello!",
                    "refusal": None,
                    "annotations": None,
                    "audio": None,
                    "function_call": None,
                    "reasoning": None,
                },
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "service_tier": None,
        "usage": {
            "prompt_tokens": 8,
            "completion_tokens": 6,
            "total_tokens": 14,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }


def test_chat_logprobs(server):
    server.engine.samples = [Sample.of("é")]
    choice = server.chat(logprobs=True, top_logprobs=2).json()["choices"][0]
    first = choice["logprobs"]["content"][0]
    token_id = server.engine.tokenizer.encode("é", False)[0]
    assert first["bytes"] == [0xC3]
    assert first["logprob"] == -float(token_id % 3 + 1)
    assert len(first["top_logprobs"]) == 2
    ordered = [entry["logprob"] for entry in first["top_logprobs"]]
    assert ordered == sorted(ordered, reverse=True)
    plain = server.chat(logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in plain] == [[], []]


def test_impossible_tokens_have_the_floor(server):
    answer = strict_json(server.chat(logprobs=True, top_logprobs=3, prompt_logprobs=2).text)
    for entry in answer["choices"][0]["logprobs"]["content"]:
        assert entry["top_logprobs"][-1]["logprob"] == -9999.0
    for table in answer["prompt_logprobs"][1:]:
        assert min(entry["logprob"] for entry in table.values()) == -9999.0
    choice = strict_json(server.complete(logprobs=3, echo=True).text)["choices"][0]
    assert all(-9999.0 in top.values() for top in choice["logprobs"]["top_logprobs"][1:])


def test_ids_above_the_vocabulary_have_names(server):
    server.engine.samples = [Sample([259, END], ["", ""])]
    content = server.chat(logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert [(entry["token"], entry["bytes"]) for entry in content] == [
        ("token_id:259", []),
        ("<|end|>", list(b"<|end|>")),
    ]
    tokens = server.complete(logprobs=0).json()["choices"][0]["logprobs"]["tokens"]
    assert tokens == ["token_id:259", "<|end|>"]


def test_completion_logprobs_and_echo(server):
    server.engine.samples = [Sample.of("cé")]
    choice = server.complete(prompt="日b", echo=True, logprobs=1).json()["choices"][0]
    assert choice["text"] == "日bcé"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"][0] == "<|begin|>"
    assert logprobs["text_offset"] == [0, 0, 0, 0, 1, 2, 3, 3]
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    assert all(isinstance(value, float) for value in logprobs["token_logprobs"][1:])
    assert all(1 <= len(top) <= 2 for top in logprobs["top_logprobs"][1:])
    plain = server.complete(prompt="日b", logprobs=1).json()["choices"][0]["logprobs"]
    assert plain["text_offset"] == [0, 1, 1]
    named = server.complete(logprobs=0, return_tokens_as_token_ids=True).json()
    assert named["choices"][0]["logprobs"]["tokens"][0].startswith("token_id:")


@pytest.mark.parametrize("stream", [False, True])
def test_max_tokens_of_zero_scores_the_prompt(server, stream):
    response = server.complete(
        prompt=["ab", "c"], echo=True, max_tokens=0, logprobs=1, stream=stream
    )
    if stream:
        choices = [event["choices"][0] for event in read_events(response)]
        choices = [choice for choice in choices if choice["text"]]
    else:
        choices = response.json()["choices"]
        assert [choice["finish_reason"] for choice in choices] == ["length", "length"]
        assert response.json()["usage"]["completion_tokens"] == 0
    assert [choice["text"] for choice in choices] == ["ab", "c"]
    assert [len(choice["logprobs"]["tokens"]) for choice in choices] == [3, 2]
    prompt_logprobs = {params.prompt_logprobs for _p, params, *_r in server.engine.requests}
    assert prompt_logprobs == {1}
    assert server.complete(echo=True, max_tokens=0).json()["choices"][0]["logprobs"] is None


def test_prompt_forms(server):
    for prompt, count in (("ab", 1), (["ab", "c"], 2), ([65, 66], 1), ([[65], [66, 67]], 2)):
        server.engine.requests.clear()
        answer = server.complete(prompt=prompt, n=2, echo=True, return_token_ids=True).json()
        assert [choice["index"] for choice in answer["choices"]] == list(range(2 * count))
        assert len(server.engine.requests) == count
    assert [choice["text"] for choice in answer["choices"]] == [
        "bHello!", "bHello!", "cdHello!", "cdHello!"
    ]  # fmt: skip
    assert answer["choices"][3]["prompt_token_ids"] == [66, 67]
    prompts = [prompt for prompt, *_rest in server.engine.requests]
    assert prompts == [TokenPrompt(token_ids=[65]), TokenPrompt(token_ids=[66, 67])]
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == 24


def test_prompt_extras(server):
    answer = server.chat(prompt_logprobs=1, return_prompt_text=True, return_token_ids=True).json()
    assert answer["prompt_text"] == "<user>Hi"
    assert len(answer["prompt_token_ids"]) == len(answer["prompt_logprobs"]) == 8
    assert answer["prompt_logprobs"][0] is None
    own_id = str(answer["prompt_token_ids"][1])
    assert answer["prompt_logprobs"][1][own_id]["decoded_token"] == "u"
    assert answer["choices"][0]["token_ids"] == server.engine.samples[0].token_ids
    completion = server.complete(prompt_logprobs=0).json()["choices"][0]
    assert completion["prompt_logprobs"][0] is None
    assert len(completion["prompt_logprobs"]) == 3


def test_greedy_with_several_samples_is_allowed(server):
    assert len(server.chat(n=3, temperature=0).json()["choices"]) == 3


# -- ids ------------------------------------------------------------------------------------------


def test_request_ids(server):
    response = server.chat(request_id="body-id")
    assert response.headers["x-request-id"] == "body-id"
    assert response.json()["id"] == "chatcmpl-body-id"
    headers = {"X-Request-Id": "head-id"}
    for stream in (False, True):
        response = server.post(
            "/v1/completions",
            {"prompt": "a", "request_id": "body-id", "stream": stream},
            headers=headers,
        )
        assert response.headers["x-request-id"] == "head-id"
        assert '"id":"cmpl-head-id"' in response.text
    bad = server.http.get("/version", headers={"X-Request-Id": "x" * 500}).headers["x-request-id"]
    assert len(bad) == 32
    assert server.http.get("/nope").headers["x-request-id"]


def test_equal_ids_in_flight_do_not_meet_in_the_engine(server):
    server.engine.delay = 0.02
    with server.http.stream(
        "POST", "/v1/completions", json={"prompt": "a", "stream": True, "request_id": "same"}
    ) as first:
        lines = first.iter_lines()
        next(lines)
        assert server.complete(request_id="same").json()["id"] == "cmpl-same"
    ids = [request_id for _p, _q, request_id, *_r in server.engine.requests]
    assert len(set(ids)) == 2


# -- the other routes -----------------------------------------------------------------------------


def test_models(server):
    listed = server.http.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == ["small", "org/alias"]
    card = server.http.get("/v1/models/org/alias").json()
    assert card | {"created": 0} == {
        "id": "org/alias", "object": "model", "created": 0, "owned_by": "cardan", "root": "tiny",
        "parent": None, "max_model_len": 512, "permission": [],
    }  # fmt: skip


def test_tokenize_and_detokenize(server):
    answer = server.post("/tokenize", {"prompt": "aé", "return_token_strs": True}).json()
    assert answer == {
        "count": 4,
        "max_model_len": 512,
        "tokens": [BEGIN, *server.engine.tokenizer.encode("aé", False)],
        "token_strs": ["<|begin|>", "a", "Ã", "©"],
    }
    assert server.post("/detokenize", {"tokens": answer["tokens"]}).json() == {
        "prompt": "<|begin|>aé"
    }
    plain = server.post("/tokenize", {"prompt": "a", "add_special_tokens": False}).json()
    assert (plain["count"], plain["token_strs"]) == (1, None)
    chat = {"messages": [{"role": "user", "content": "Hi"}], "tools": [{"type": "function"}]}
    assert server.post("/tokenize", chat).json()["count"] == 8


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "a", "chat_template": "x"}, "chat_template"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [258]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ],
)
def test_bad_token_requests(server, path, body, param):
    response = server.post(path, body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_health(server):
    for path in ("/health", "/ready", "/ping"):
        assert (server.http.get(path).status_code, server.http.get(path).content) == (200, b"")
        assert server.http.head(path).status_code == 200
    assert server.http.post("/ping").status_code == 200
    server.engine.state = EngineHealth("stuck", "no step for 61 s", 61.0)
    for path in ("/health", "/ready", "/ping"):
        response = server.http.get(path)
        assert response.status_code == 503
        assert response.json()["error"]["message"] == "the engine is stuck: no step for 61 s"


def test_a_plugin_that_says_unhealthy(server):
    server.engine.state = running_health(0.0, PluginReport({}, ("plugin acme: too hot",)))
    response = server.http.get("/health")
    assert response.status_code == 503
    assert response.json()["error"]["message"] == "the engine is unhealthy: plugin acme: too hot"
    assert server.complete().status_code == 200


def test_small_routes(server):
    assert server.http.get("/version").json() == {"version": "0.1.0"}
    server.engine.totals = replace(server.engine.totals, num_running=2, kv_usage=0.5)
    assert server.http.get("/load").json() == {
        "server_load": 0, "num_running": 2, "num_waiting": 0, "kv_cache_usage": 0.5
    }  # fmt: skip
    assert server.http.head("/v1/models").status_code == 200
    assert server.http.get("/docs").status_code == 200


def test_openapi_describes_the_bodies(server):
    document = strict_json(server.http.get("/openapi.json").text)
    operation = document["paths"]["/v1/chat/completions"]["post"]
    ref = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    schema = document["components"]["schemas"][ref.rpartition("/")[2]]
    assert schema["required"] == ["messages"]
    number, null = schema["properties"]["n"]["anyOf"]
    assert null == {"type": "null"}
    assert (number["type"], number["minimum"], number["maximum"]) == ("integer", 1, 1024)
    texts = schema["properties"]["stop"]["anyOf"][0]["anyOf"]
    assert {"type": "string", "minLength": 1} in texts
    top_k = schema["properties"]["top_k"]["anyOf"][0]["anyOf"][0]
    assert (top_k["minimum"], top_k["maximum"]) == (-1, 2**63 - 1)
    ids = schema["properties"]["stop_token_ids"]["anyOf"][0]["items"]
    assert (ids["minimum"], ids["maximum"]) == (0, 259)
    assert schema["properties"]["model"]["anyOf"][0]["enum"] == ["small", "org/alias"]
    assert "default" in operation["responses"]
    text = str(document)
    assert "#/$defs" not in text


def test_request_log_has_sizes_and_settings_but_no_text(server, caplog):
    with caplog.at_level(logging.INFO, logger="cardan.server"):
        secret = [{"role": "user", "content": "my secret"}]
        server.chat(messages=secret, temperature=0.5, stop="secret-stop", request_id="r1")
    (record,) = [r for r in caplog.records if r.name == "cardan.server.respond"]
    assert record.request_id == "chatcmpl-r1"
    message = record.getMessage()
    assert message.startswith("1 prompts, 15 tokens (0 cached) -> 6 tokens in ")
    assert message.endswith("temperature=0.5")
    assert "secret" not in message


# -- access ---------------------------------------------------------------------------------------


def test_api_keys():
    with running(api_keys=("key-one", "kéy-two")) as server:
        for path in ("/health", "/ready", "/ping", "/version", "/metrics"):
            assert server.http.get(path).status_code == 200
        guarded = ("/v1/models", "/load", "/docs", "/openapi.json", "/nope", "/v1/models/tiny")
        for path in guarded:
            assert server.http.get(path).status_code == 401
        for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
            response = server.post(path, {})
            assert response.status_code == 401
            assert response.headers["www-authenticate"] == "Bearer"
            assert response.json()["error"]["code"] == 401
        for value in ("key-one", "Bearer key-on", "Bearer key-one2", "Basic key-one", "Bearer"):
            bad = server.http.get("/v1/models", headers={"Authorization": value})
            assert bad.status_code == 401
        for value in ("Bearer key-one", "bearer key-one", "Bearer kéy-two".encode()):
            good = server.http.get("/v1/models", headers={"Authorization": value})
            assert good.status_code == 200
        assert server.engine.requests == []


def test_cors_only_for_configured_origins():
    preflight = {"Access-Control-Request-Method": "POST"}
    with running(api_keys=("k",), allowed_origins=("https://a.example",)) as server:
        good = {"Origin": "https://a.example"}
        response = server.http.options("/v1/models", headers={**good, **preflight})
        assert response.headers["access-control-allow-origin"] == "https://a.example"
        assert response.status_code == 200
        refused = server.http.get("/v1/models", headers=good)
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://a.example"
        bad = server.http.get("/health", headers={"Origin": "https://b.example"})
        assert "access-control-allow-origin" not in bad.headers
    with running() as server:
        response = server.http.get("/health", headers={"Origin": "https://a.example"})
        assert "access-control-allow-origin" not in response.headers


def test_root_path():
    with running(root_path="/llm", api_keys=("k",)) as server:
        for path in ("/health", "/llm/health"):
            assert server.http.get(path).status_code == 200
        for path in ("/v1/models", "/llm/v1/models", "/llmhealth", "/llm/nope"):
            assert server.http.get(path).status_code == 401
        headers = {"Authorization": "Bearer k"}
        for path in ("/v1/models/tiny", "/llm/v1/models/tiny"):
            assert server.http.get(path, headers=headers).json()["id"] == "tiny"
        assert server.http.get("/llm/nope", headers=headers).status_code == 404
