"""A stream folded by somebody who only read the documentation equals the unstreamed answer."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server_helpers import FakeEngine, Sample, fold_chat, read_events, running, strict_json


@pytest.fixture(scope="module")
def shared():
    with running() as server:
        yield server


@pytest.fixture
def server(shared):
    shared.engine.__dict__.update(FakeEngine().__dict__)
    return shared


def flat_chat(answer):
    """The unstreamed answer in the shape of `fold_chat`."""
    choices = {}
    for choice in answer["choices"]:
        message = choice["message"]
        choices[choice["index"]] = {
            "role": message["role"],
            "content": message["content"],
            "logprobs": choice["logprobs"] and choice["logprobs"]["content"],
            "finish_reason": choice["finish_reason"],
            "stop_reason": choice["stop_reason"],
            **({"token_ids": choice["token_ids"]} if "token_ids" in choice else {}),
        }
    kept = ("model", "system_fingerprint", "usage", "prompt_token_ids", "prompt_text")
    return {"choices": choices, **{name: answer[name] for name in kept if name in answer}}


def fold_completion(events):
    answer = {"choices": {}, "usage": None}
    for event in events:
        assert event["object"] == "text_completion"
        answer["usage"] = event.get("usage") or answer["usage"]
        for choice in event["choices"]:
            total = answer["choices"].setdefault(
                choice["index"], {"text": "", "logprobs": None, "finish_reason": None}
            )
            assert total["finish_reason"] is None
            for name, value in choice.items():
                if name == "text":
                    total[name] += value
                elif name == "token_ids":
                    total[name] = total.get(name, []) + value
                elif name == "logprobs":
                    if value and total[name]:
                        total[name] = {key: total[name][key] + value[key] for key in value}
                    else:
                        total[name] = total[name] or value
                else:
                    total[name] = value
    answer["choices"] = [answer["choices"][index] for index in sorted(answer["choices"])]
    return answer


samples_strategy = st.lists(
    st.builds(
        lambda text, reason, stop: Sample.of(text, finish_reason=reason, stop_reason=stop),
        st.text(alphabet='ab é日👍\n"', max_size=8),
        st.sampled_from(["stop", "length"]),
        st.sampled_from([None, 7, "end"]),
    ),
    min_size=1,
    max_size=3,
)
sizes_strategy = st.lists(st.integers(0, 4), min_size=1, max_size=5).filter(any)


def set_script(server, samples, sizes):
    server.engine.samples = samples
    server.engine.chunk = lambda i: sizes[i % len(sizes)]


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    samples=samples_strategy,
    sizes=sizes_strategy,
    whole_sizes=sizes_strategy,
    n=st.integers(1, 3),
    logprobs=st.booleans(),
    options=st.fixed_dictionaries(
        {},
        optional={
            "return_token_ids": st.just(True),
            "return_tokens_as_token_ids": st.just(True),
            "return_prompt_text": st.just(True),
            "stream_interval": st.integers(1, 9),
            "max_tokens": st.integers(1, 6),
            "echo": st.just(True),
        },
    ),
)
def test_chat_fold_equals_unstreamed(server, samples, sizes, whole_sizes, n, logprobs, options):
    body = {"n": n, "logprobs": logprobs, "top_logprobs": 2 if logprobs else 0, **options}
    body["messages"] = [
        {"role": "user", "content": "Hé"},
        {"role": "assistant", "content": "so"},
    ]
    set_script(server, samples, sizes)
    usage = {"stream_options": {"include_usage": True}}
    folded = fold_chat(read_events(server.chat(**body, stream=True, **usage)))
    set_script(server, samples, whole_sizes)
    response = server.chat(**body)
    whole = flat_chat(strict_json(response.text))
    assert {name: folded[name] for name in whole} == whole


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    samples=samples_strategy,
    sizes=sizes_strategy,
    whole_sizes=sizes_strategy,
    n=st.integers(1, 3),
    prompt=st.sampled_from(["Hé", ["a", "日本"], [72, 73], [[72], [73, 74]]]),
    options=st.fixed_dictionaries(
        {},
        optional={
            "logprobs": st.integers(0, 3),
            "return_token_ids": st.just(True),
            "return_tokens_as_token_ids": st.just(True),
            "echo": st.just(True),
            "max_tokens": st.integers(1, 6),
        },
    ),
)
def test_completion_fold_equals_unstreamed(server, samples, sizes, whole_sizes, n, prompt, options):
    set_script(server, samples, sizes)
    body = {"prompt": prompt, "n": n, **options}
    usage = {"stream_options": {"include_usage": True}}
    folded = fold_completion(read_events(server.complete(**body, stream=True, **usage)))
    set_script(server, samples, whole_sizes)
    whole = strict_json(server.complete(**body).text)
    assert folded["choices"] == whole["choices"]
    assert folded["usage"] == whole["usage"]
    num_prompts = len(prompt) if isinstance(prompt[0], (str, list)) and len(prompt) != 1 and not (
        isinstance(prompt, str)) else 1  # fmt: skip
    assert [choice["index"] for choice in whole["choices"]] == list(range(num_prompts * n))
    if "logprobs" in options:
        for choice in whole["choices"]:
            lengths = {len(column) for column in (choice["logprobs"] or {}).values()}
            assert len(lengths) <= 1
