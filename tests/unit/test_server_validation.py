"""Every bad field is a 400 that names it, and nothing bad reaches the engine."""

import json

import pytest
from server_helpers import FakeEngine, make_tokenizer, running, strict_json

from cardan.core.types.prompt import ChatPrompt, TextPrompt, TokenPrompt
from cardan.core.types.sampling_params import OutputKind

HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def shared():
    with running() as server:
        yield server


@pytest.fixture
def server(shared):
    shared.engine.__dict__.update(FakeEngine().__dict__)
    return shared


def assert_bad(server, response, param, status=400):
    assert response.status_code == status, response.text
    error = strict_json(response.text)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert error["param"] == param
    assert error["message"]
    for secret in ("Traceback", "cardan.", "/work", "pydantic", "ValueError"):
        assert secret not in error["message"]
    assert server.engine.requests == []
    return error["message"]


BOTH = [
    ("temperature", 2.01), ("temperature", -0.1), ("temperature", "1"), ("temperature", True),
    ("top_p", 0), ("top_p", 1.1), ("top_k", -2), ("top_k", 1.5), ("min_p", -0.1), ("min_p", 2),
    ("repetition_penalty", 0), ("presence_penalty", 2.1), ("frequency_penalty", -2.1),
    ("n", 0), ("n", 5000), ("n", "2"), ("n", True), ("seed", 2**63), ("seed", "x"),
    ("max_tokens", -1), ("max_tokens", "many"), ("min_tokens", -1),
    ("stop", ""), ("stop", ["a", ""]), ("stop", 5), ("stop", ["x"] * 65),
    ("stop_token_ids", [-1]), ("stop_token_ids", "a"), ("allowed_token_ids", []),
    ("bad_words", [""]), ("logit_bias", {"x": 1}), ("logit_bias", {"-1": 1}), ("logit_bias", [1]),
    ("logit_bias", {"1": "a"}), ("stream", "yes"), ("stream_options", {"include_usage": True}),
    ("ignore_eos", 1), ("prompt_logprobs", -2), ("prompt_logprobs", 21), ("prompt_logprobs", -1),
    ("truncate_prompt_tokens", 0), ("truncate_prompt_tokens", -2), ("truncation_side", "middle"),
    ("stream_interval", 0), ("priority", "high"), ("priority", 2**70), ("request_id", "a b"),
    ("request_id", ""), ("cache_salt", ""), ("cache_salt", "x" * 129), ("cache_salt", "a@b"),
    ("cache_salt", "a/b"), ("cache_salt", "a\\b"), ("cache_salt", "a\0"), ("model", 5),
    ("skip_special_tokens", "no"), ("echo", "no"), ("return_token_ids", 3),
    # asks for what is not there
    ("tools", []), ("tools", [{"type": "function"}]), ("tool_choice", "auto"),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}), ("functions", []),
    ("response_format", {"type": "json_object"}), ("response_format", {"type": "json_schema"}),
    ("response_format", "text"), ("structured_outputs", {"regex": "a"}),
    ("guided_json", {"type": "object"}), ("guided_regex", "a"), ("guided_choice", ["a"]),
    ("guided_grammar", "root ::= x"), ("guided_decoding_backend", "x"), ("guided_new_thing", 1),
    ("regex", "a"), ("ebnf", "a"), ("json_schema", "{}"), ("structural_tag", {}),
    ("responce_format", {"type": "json_object"}), ("structured_output", {"regex": "a"}),
    ("use_beam_search", True), ("best_of", 2), ("best_of", True), ("length_penalty", 0.5),
    ("suffix", "x"), ("prompt_embeds", "AAAA"), ("modalities", ["audio"]), ("audio", {}),
    ("reasoning_effort", "high"), ("thinking_token_budget", 10), ("logprob_token_ids", [1]),
    ("repetition_detection", {"min_count": 2}), ("watermarking", True),
    ("kv_transfer_params", {"a": 1}), ("ec_transfer_params", {"a": 1}), ("vllm_xargs", {"a": {}}),
    ("chat_template", "{{ x }}"), ("media_io_kwargs", {}), ("mm_processor_kwargs", {}),
]  # fmt: skip


@pytest.mark.parametrize("path", ["chat", "complete"])
@pytest.mark.parametrize(("field", "value"), BOTH, ids=lambda v: json.dumps(v)[:30])
def test_bad_field(server, path, field, value):
    response = getattr(server, path)(**{field: value})
    name = json.loads(response.text)["error"]["param"]
    assert_bad(server, response, name)
    assert name.split("[")[0].split(".")[0] == field


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": ["Hi"]}, "messages[0]"),
        ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
        ({"messages": [*HI, {"role": "robot", "content": "x"}]}, "messages[1].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0]",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "messages[0].content[0]",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "video_url"}]}]},
            "messages[0].content[0]",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "smell"}]}]},
            "messages[0].content[0]",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": 1}}]}]},
            "messages[0].tool_calls[0].function.name",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "f", "arguments": "{x"}}],
                    }
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 5}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"documents": "a"}, "documents"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ],
)
def test_bad_chat(server, fields, param):
    assert_bad(server, server.chat(**fields), param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [[1], ["a"]]}, "prompt"),
        ({"prompt": ["a"] * 2049}, "prompt"),
        ({"prompt": ["a", "b" * 512]}, "prompt"),
        ({"prompt": [[1], [260]]}, "prompt"),
        ({"prompt": ["a", ""], "add_special_tokens": False}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_completion(server, fields, param, stream):
    assert_bad(server, server.complete(**fields, stream=stream), param)


@pytest.mark.parametrize("path", ["chat", "complete"])
def test_null_equals_absent(server, path):
    names = {name for name, _value in BOTH} | {"max_completion_tokens", "top_logprobs", "user"}
    plain = getattr(server, path)()
    nulls = getattr(server, path)(**dict.fromkeys(sorted(names)))
    assert nulls.status_code == 200, nulls.text
    assert "x-cardan-ignored-fields" not in nulls.headers
    assert nulls.json()["choices"] == plain.json()["choices"]
    assert server.engine.requests[0][1] == server.engine.requests[1][1]


@pytest.mark.parametrize("path", ["chat", "complete"])
def test_values_that_ask_for_nothing_are_no_error(server, path):
    response = getattr(server, path)(
        tool_choice="none", response_format={"type": "text"}, best_of=1, use_beam_search=False,
        length_penalty=1.0, suffix="", modalities=["text"], reasoning_effort="none",
        thinking_token_budget=-1, vllm_xargs={}, watermarking=False, parallel_tool_calls=True,
    )  # fmt: skip
    assert response.status_code == 200, response.text
    assert "x-cardan-ignored-fields" not in response.headers


@pytest.mark.parametrize("stream", [False, True])
def test_unknown_fields_are_accepted_and_named(server, stream):
    response = server.chat(
        user="me", store=True, **{"bad\nname é": 1}, stream=True, stream_options={"extra": 1}
    )
    assert response.status_code == 200
    assert response.headers["x-cardan-ignored-fields"] == (
        "bad?name??, store, stream_options.extra, user"
    )


def test_schema_problems_are_listed_clipped_and_at_most_ten(server):
    message = assert_bad(server, server.chat(seed="x" * 5000, temperature=9), "temperature")
    assert "seed: input should be a valid integer (got " in message
    assert "temperature: input should be less than or equal to 2 (got 9)" in message
    assert len(message) < 400
    ids = [-1] * 50
    message = assert_bad(server, server.chat(stop_token_ids=ids), "stop_token_ids[0]")
    assert message.count("stop_token_ids[") == 10
    assert message.endswith("and 40 more")


def test_settings_reach_the_engine(server):
    server.complete(
        prompt="Hi", n=2, temperature=0, top_p=0.5, top_k=-1, min_p=0.1, repetition_penalty=1.2,
        presence_penalty=1, frequency_penalty=-1, seed=-5, stop=["a", "b"], stop_token_ids=[3],
        ignore_eos=True, max_tokens=9, min_tokens=2, logprobs=3, logit_bias={"7": 400, "8": -1},
        allowed_token_ids=[1, 2], bad_words=["no"], skip_special_tokens=False,
        spaces_between_special_tokens=False, include_stop_str_in_output=True,
        truncate_prompt_tokens=2, stream=True, stream_interval=4, priority=-3, cache_salt="s",
        add_special_tokens=False, request_id="my-id",
    )  # fmt: skip
    prompt, params, request_id, priority, salt = server.engine.requests[0]
    assert prompt == TextPrompt(text="Hi", add_special_tokens=False)
    assert (request_id, priority, salt) == ("cmpl-my-id", -3, "s")
    expected = {
        "n": 2, "temperature": 0, "top_p": 0.5, "top_k": 0, "min_p": 0.1,
        "repetition_penalty": 1.2, "presence_penalty": 1, "frequency_penalty": -1, "seed": -5,
        "stop": ("a", "b"), "stop_token_ids": (3,), "ignore_eos": True, "max_tokens": 9,
        "min_tokens": 2, "logprobs": 3, "prompt_logprobs": None, "logit_bias": {7: 100.0, 8: -1.0},
        "allowed_token_ids": (1, 2), "bad_words": ("no",), "skip_special_tokens": False,
        "spaces_between_special_tokens": False, "include_stop_str_in_output": True,
        "truncate_prompt_tokens": 2, "stream_interval": 4, "output_kind": OutputKind.DELTA,
    }  # fmt: skip
    assert {name: getattr(params, name) for name in expected} == expected


def test_defaults(server):
    server.complete()
    server.chat()
    server.chat(max_tokens=5)
    server.chat(max_tokens=5, max_completion_tokens=7)
    limits = [params.max_tokens for _prompt, params, *_rest in server.engine.requests]
    assert limits == [16, None, 5, 7]
    assert server.engine.requests[0][0].add_special_tokens
    chat = server.engine.requests[1][0]
    assert isinstance(chat, ChatPrompt)
    assert (chat.add_generation_prompt, chat.add_special_tokens) == (True, False)


def test_the_models_own_defaults_lie_under_the_request():
    from dataclasses import replace

    engine = FakeEngine()
    config = {"temperature": 0.6, "top_k": 20, "do_sample": True}
    engine.info = replace(engine.info, generation_config=config)
    with running(engine) as server:
        server.chat()
        server.chat(temperature=0, top_k=0)
    temperatures = [(params.temperature, params.top_k) for _p, params, *_r in engine.requests]
    assert temperatures == [(0.6, 20), (0, 0)]


def test_truncation_on_the_right_keeps_the_first_tokens(server):
    server.complete(prompt="abcd", truncate_prompt_tokens=3, truncation_side="right")
    prompt, params, *_rest = server.engine.requests[0]
    assert prompt == TokenPrompt(token_ids=[256, 64, 65])
    assert params.truncate_prompt_tokens is None


# -- messages -------------------------------------------------------------------------------------


def sent_messages(server, messages):
    response = server.chat(messages=messages)
    assert response.status_code == 200, response.text
    return server.engine.requests[-1][0].messages


def test_content_forms(server):
    parts = [{"type": "text", "text": "a"}, "b", {"type": "refusal", "refusal": "c"}]
    messages = [
        {"role": "system", "content": "s", "name": "n"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "t"}, {"text": "x"}]},
        {"role": "assistant", "content": None, "refusal": "no"},
        {"role": "assistant", "content": "y", "reasoning_content": "r"},
        {"role": "tool", "content": "4", "tool_call_id": "c1"},
    ]
    assert sent_messages(server, messages) == [
        {"role": "system", "content": "s", "name": "n"},
        {"role": "user", "content": "a\nb\nc"},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": "x", "reasoning": "t"},
        {"role": "assistant", "content": "no"},
        {"role": "assistant", "content": "y", "reasoning_content": "r"},
        {"role": "tool", "content": "4", "tool_call_id": "c1"},
    ]


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}, "", None])
def test_arguments_of_tool_calls_become_objects(server, arguments):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    sent = sent_messages(server, [*HI, {"role": "assistant", "tool_calls": [call]}])
    expected = {"a": 1} if arguments else {}
    assert sent[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": expected}
    assert sent[1]["content"] == ""


def test_developer_becomes_system_unless_the_template_knows_it(server):
    messages = [{"role": "developer", "content": "be brief"}]
    assert sent_messages(server, messages)[0]["role"] == "system"
    server.engine.tokenizer = make_tokenizer("{% if role == 'developer' %}{% endif %}")
    assert sent_messages(server, messages)[0]["role"] == "developer"


def test_a_role_that_only_the_template_knows(server):
    server.engine.tokenizer = make_tokenizer("{% if role == 'ipython' %}{% endif %}")
    assert sent_messages(server, [{"role": "ipython", "content": "x"}])[0]["role"] == "ipython"


def test_echo_repeats_the_answerers_last_message(server):
    messages = [*HI, {"role": "assistant", "content": "I say: "}]
    fields = {"add_generation_prompt": False, "continue_final_message": True, "echo": True}
    answer = server.chat(messages=messages, **fields).json()
    assert answer["choices"][0]["message"]["content"] == "I say: Hello!"
    assert server.chat(echo=True).json()["choices"][0]["message"]["content"] == "Hello!"


# -- bodies and paths -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", 400), (b"{", 400), (b"[]", 400), (b'"x"', 400), (b"\xff\xfe", 400),
        (b'{"messages": NaN}', 400), (b'{"a": "\\ud800"}', 400), (b"[" * 100_000, 400),
        (b'{"a":' * 300 + b"1" + b"}" * 300, 400), (b'{"temperature": 1e999}', 400),
    ],
    ids=range(10),
)  # fmt: skip
def test_malformed_json(server, content, status):
    headers = {"content-type": "application/json"}
    response = server.http.post("/v1/chat/completions", content=content, headers=headers)
    assert response.status_code == status
    assert set(strict_json(response.text)["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("content_type", ["text/plain", "multipart/form-data", ""])
def test_wrong_content_type(server, content_type):
    response = server.http.post(
        "/v1/completions", content=b'{"prompt": "a"}', headers={"content-type": content_type}
    )
    assert_bad(server, response, None, 415)


def test_json_content_types(server):
    for content_type in ("application/json; charset=utf-8", "application/vnd.api+json"):
        headers = {"content-type": content_type}
        response = server.http.post("/v1/completions", content=b'{"prompt":"a"}', headers=headers)
        assert response.status_code == 200


def test_body_size_cap():
    with running(max_body_bytes=200) as server:
        assert server.complete(prompt="a" * 100).status_code == 200
        assert_status = [server.complete(prompt="a" * 300).status_code]
        chunks = iter([b'{"prompt": "', b"a" * 300, b'"}'])
        headers = {"content-type": "application/json"}
        response = server.http.post("/v1/completions", content=chunks, headers=headers)
        assert_status.append(response.status_code)
        assert assert_status == [413, 413]
        assert "200 bytes" in response.json()["error"]["message"]
        assert len(server.engine.requests) == 1


def test_unknown_paths_methods_and_models(server):
    assert_bad(server, server.http.get("/nope"), None, 404)
    assert_bad(server, server.http.get("/v1/chat/completions"), None, 405)
    assert server.http.get("/v1/chat/completions").headers["allow"] == "POST"
    assert_bad(server, server.chat(model="gpt-4"), "model", 404)
    assert_bad(server, server.complete(model="gpt-4"), "model", 404)
    assert_bad(server, server.http.get("/v1/models/gpt-4"), "model", 404)
    assert_bad(server, server.post("/tokenize", {"prompt": "a", "model": "x"}), "model", 404)
