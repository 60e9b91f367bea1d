"""The served demo model: clients, aborts, faults, ends."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import psutil
import pytest
from prompts import NUM_TOKENS
from server_process import Server, serving

pytestmark = [pytest.mark.model, pytest.mark.slow]

ARGUMENTS = (
    "--dtype", "float32", "--quantization", "none", "--kv-cache-memory-bytes", "200MiB",
    "--max-model-len", "2048",
)  # fmt: skip
LONG = {"prompt": "Count: 1 2 3", "max_tokens": 1500, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server") / "log", *ARGUMENTS) as server:
        yield server


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def test_answers_like_transformers(client, greedy_truth) -> None:
    for ids, expected in greedy_truth[:6]:
        answer = client.completions.create(
            model="demo",
            prompt=ids,
            max_tokens=NUM_TOKENS,
            temperature=0,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        assert answer.choices[0].token_ids == expected
        assert answer.usage.prompt_tokens == len(ids)
        assert answer.usage.completion_tokens == len(expected)


def test_stream_folds_to_the_whole(client) -> None:
    request = {
        "model": "demo",
        "messages": [{"role": "user", "content": "Tell me about the moon in two sentences."}],
        "temperature": 0.8,
        "seed": 7,
        "max_tokens": 40,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = client.chat.completions.create(**request)
    texts, logprobs, reasons = ["", ""], [[], []], [None, None]
    usage = None
    for chunk in client.chat.completions.create(
        **request, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.logprobs is not None:
                logprobs[choice.index] += choice.logprobs.content or []
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts[0] != texts[1]
    for choice in whole.choices:
        assert texts[choice.index] == choice.message.content
        assert reasons[choice.index] == choice.finish_reason
        ours = [(item.token, item.bytes) for item in logprobs[choice.index]]
        assert ours == [(item.token, item.bytes) for item in choice.logprobs.content]
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_a_gone_client_ends_its_request(server: Server) -> None:
    for stream in (True, False):
        body = {**LONG, "model": "demo", "stream": stream}
        with httpx.Client(timeout=30) as http:
            if stream:
                with http.stream("POST", server.url + "/v1/completions", json=body) as response:
                    next(response.iter_lines())
            else:
                with pytest.raises(httpx.ReadTimeout):
                    http.post(server.url + "/v1/completions", json=body, timeout=1.0)
        began = time.monotonic()
        server.wait_idle()
        # 1500 tokens would take a minute; a step takes milliseconds.
        assert time.monotonic() - began < 5


def test_many_clients_at_once(client, greedy_truth) -> None:
    answers: dict[int, list[int]] = {}

    def ask(place: int) -> None:
        ids, _ = greedy_truth[place]
        answer = client.completions.create(
            model="demo",
            prompt=ids,
            max_tokens=NUM_TOKENS,
            temperature=0,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        answers[place] = answer.choices[0].token_ids

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {place: greedy_truth[place][1] for place in range(24)}


def test_metrics_add_up(server: Server, client) -> None:
    before = server.metric("vllm:generation_tokens_total")
    answer = client.completions.create(model="demo", prompt="One", max_tokens=5, temperature=0)
    server.wait_idle()
    assert server.metric("vllm:generation_tokens_total") - before == answer.usage.completion_tokens
    assert server.metric("cardan:startup_seconds") > 0


def test_stuck_engine_turns_health_and_recovers(server: Server) -> None:
    server.engine.send_signal(signal.SIGSTOP)
    try:
        _wait_for_health(server, 503, 10)
    finally:
        server.engine.send_signal(signal.SIGCONT)
    _wait_for_health(server, 200, 10)


def test_a_dead_engine_ends_streams_and_is_replaced(tmp_path: Path, greedy_truth) -> None:
    ids, expected = greedy_truth[0]
    body = {**LONG, "model": "demo", "stream": True}
    with serving(tmp_path / "log", *ARGUMENTS, "--max-engine-restarts", "1") as server:
        first = server.engine.pid
        lines: list[str] = []
        with httpx.stream(
            "POST", server.url + "/v1/completions", json=body, timeout=30
        ) as response:
            stream = response.iter_lines()
            next(stream)
            server.engine.kill()
            lines += [line for line in stream if line]
        assert '"error"' in lines[-2]
        assert lines[-1] == "data: [DONE]"
        _wait_for_health(server, 503, 5)
        answer = httpx.post(server.url + "/v1/completions", json={"prompt": "x"}, timeout=10)
        assert answer.status_code == 503
        assert "restarted, because the engine process was ended by SIGKILL" in answer.text
        assert answer.headers["Retry-After"]

        _wait_for_health(server, 200, 60)
        assert server.engine.pid != first
        assert server.metric("cardan:engine_restarts_total") == 1
        server.wait_idle()
        fields = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        body = {"prompt": ids, **fields, "return_token_ids": True}
        answer = httpx.post(server.url + "/v1/completions", json=body, timeout=60)
        assert answer.json()["choices"][0]["token_ids"] == expected

        server.engine.kill()
        _wait_for_health(server, 503, 5)
        assert "not started again after 1 restarts" in server.get("/health").text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_drains_and_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    with serving(tmp_path / "log", *ARGUMENTS) as server:
        engine = server.engine
        body = {**LONG, "model": "demo", "max_tokens": 60}
        answers: list[httpx.Response] = []

        def ask() -> None:
            answers.append(httpx.post(server.url + "/v1/completions", json=body, timeout=60))

        thread = threading.Thread(target=ask)
        thread.start()
        while not server.metric("cardan:num_requests_running"):
            time.sleep(0.01)
        server.process.send_signal(number)
        thread.join()
        assert answers[0].status_code == 200
        assert answers[0].json()["usage"]["completion_tokens"] == 60
        assert server.process.wait(15) == 0
        psutil.wait_procs([engine], timeout=5)
        assert not engine.is_running()


def test_an_interrupt_at_the_ready_line_is_a_stop() -> None:
    command = [sys.executable, "-m", "cardan", "serve", "demo", *ARGUMENTS, "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        assert any("ready at" in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()


def test_engine_does_not_outlive_a_killed_server(tmp_path: Path) -> None:
    with serving(tmp_path / "log", *ARGUMENTS) as server:
        engine = server.engine
        server.process.kill()
        _gone, alive = psutil.wait_procs([engine], timeout=10)
        assert not alive


def _wait_for_health(server: Server, status: int, patience: float) -> None:
    deadline = time.monotonic() + patience
    while server.get("/health").status_code != status:
        assert time.monotonic() < deadline, f"/health did not become {status}"
        time.sleep(0.1)
