"""The server and its OpenAPI document say the same, as schemathesis reads it."""

import os
import random
import re
from collections.abc import Iterator

import hypothesis
import pytest
import schemathesis
from load_server import ROOMY, SHORT, TINY, check_log, known_answer
from schemathesis.generation import GenerationMode
from server_process import Server, serving

pytestmark = [pytest.mark.model, pytest.mark.slow]

SEED = int(os.environ.get("CARDAN_LOAD_SEED") or random.randrange(10**6))
EXAMPLES = 60
BODIES = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")
PLAIN = (
    "/v1/models/{name}", "/v1/models", "/health", "/ready", "/ping", "/version", "/load",
    "/metrics",
)  # fmt: skip
UNSUPPORTED = ("tools", "tool_choice", "extra_args", "vllm_xargs")
RANGES = {
    "max_tokens": (1, 4),
    "max_completion_tokens": (1, 4),
    "min_tokens": (0, 1),
    "n": (1, 3),
    "truncate_prompt_tokens": (-1, 100),
}
SMALL_ID = re.compile("[0-9]{1,4}")
PART = ("type", "text", "refusal", "thinking")


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server") / "log", *TINY, *ROOMY, *SHORT) as server:
        yield server


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("path", BODIES)
def test_bodies_are_taken_and_refused_as_documented(
    server: Server, path: str, mode: GenerationMode
) -> None:
    before = known_answer(server)
    is_positive = mode is GenerationMode.POSITIVE

    def send(case) -> None:
        if is_positive:
            case.body = related(case.body)
        response = case.call(timeout=60)
        case.validate_response(response)
        if is_positive:
            assert response.status_code == 200, (case.body, response.text)

    _run(_operation(server, "POST", path).as_strategy(generation_mode=mode), send, EXAMPLES)
    server.wait_idle()
    assert known_answer(server) == before
    check_log(server)


@pytest.mark.parametrize("path", PLAIN)
def test_plain_routes_answer_as_documented(server: Server, path: str) -> None:
    operation = _operation(server, "GET", path)

    def send(case) -> None:
        case.call_and_validate(timeout=60)

    _run(operation.as_strategy(), send, 20)


def _operation(server: Server, method: str, path: str):
    return schemathesis.openapi.from_url(server.url + "/openapi.json")[path][method]


def _run(strategy, send, num_examples: int) -> None:
    print(f"seed {SEED}")
    settings = hypothesis.settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],
    )
    hypothesis.seed(SEED)(settings(hypothesis.given(case=strategy)(send)))()


# -- what a schema cannot say ----------------------------------------------------------------------


def related(body: dict) -> dict:
    """The body with its fields in agreement with each other, and small."""
    body = {name: value for name, value in body.items() if value is not None}
    if "tokens" in body:
        return body
    _settle_input(body)
    for name in UNSUPPORTED:
        body.pop(name, None)
    if not body.get("stream"):
        body.pop("stream_options", None)
    elif body.get("prompt_logprobs"):
        del body["prompt_logprobs"]
    if not body.get("logprobs"):
        body.pop("top_logprobs", None)
    for name, (low, high) in RANGES.items():
        if name in body:
            body[name] = min(max(body[name], low), high)
    if "allowed_token_ids" in body:  # the rest could forbid all of them
        body["allowed_token_ids"] = [1000, 2000, 3000]
        body.pop("bad_words", None)
    bias = body.get("logit_bias", {})
    for name in [name for name in bias if not SMALL_ID.fullmatch(name)]:
        del bias[name]
    return body


def _settle_input(body: dict) -> None:
    if "messages" in body:
        body["messages"] = [_small_message(message) for message in body["messages"][:3]]
        body.pop("prompt", None)
        if body.get("continue_final_message"):
            body["add_generation_prompt"] = False
            body["messages"].append({"role": "assistant", "content": "Well,"})
    else:
        body["prompt"] = _small(body.get("prompt", "Hi"))  # of two fields either has to be there


def _small(value):
    if isinstance(value, list):
        return [_small(item) for item in value[:3]]
    # A vocabulary may have no token for any character of a text, and no prompt is empty.
    return "a" + value[:7] if isinstance(value, str) else value


def _small_message(message: dict) -> dict:
    """Few characters, and of what a template may print only what it knows."""
    small = {"role": message["role"]}
    content = message.get("content")
    if isinstance(content, str):
        small["content"] = content[:8]
    elif isinstance(content, list):
        small["content"] = [
            part[:8]
            if isinstance(part, str)
            else {
                name: value if name == "type" else value[:8]
                for name, value in part.items()
                if name in PART
            }
            for part in content[:2]
        ]
    for call in message.get("tool_calls") or ():
        if isinstance(call["function"].get("arguments"), str):
            call["function"]["arguments"] = "{}"
        small.setdefault("tool_calls", []).append(call)
    return small
