"""A served model on a device that fails: streams end with an error, and the next engine serves."""

import json
import time
from pathlib import Path

import httpx
import psutil
import pytest
from server_process import Server, serving

from cardan.testing.tiny_models import make_tiny_model, prompt_ids

pytestmark = pytest.mark.slow

PROMPT = prompt_ids(9, seed=4)
NUM_TOKENS = 80
REQUEST = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
FAULT_STEP = 20
MESSAGES = {
    "raise": "the engine failed: RuntimeError: fake device: step 20 failed",
    "oom": "the engine failed: OutOfMemoryError: fake device: out of memory in step 20",
    "die": "the engine process exited with code 77",
    "stuck": "the engine hung: no step has finished for",
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> tuple[Path, list[int]]:
    """A model's directory and its greedy continuation of PROMPT, by transformers."""
    import torch

    path = tmp_path_factory.mktemp("llama")
    model = make_tiny_model("llama", path)
    with torch.inference_mode():
        whole = model.generate(
            torch.tensor([PROMPT]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None
        )
    return path, whole[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("tier", ["executor", "kernel"])
@pytest.mark.parametrize("kind", MESSAGES)
def test_a_failing_device_ends_streams_and_the_next_engine_serves(
    tiny, kind, tier, tmp_path, monkeypatch
) -> None:
    path, truth = tiny
    marker = tmp_path / "happened"
    settings = f"tier={tier} depth=1 step_ms=5 fault={kind}@{FAULT_STEP} marker={marker}"
    monkeypatch.setenv("CARDAN_FAKE", settings)
    arguments = ("--platform", "fake", "--step-timeout", "2", "--hang-timeout", "3")
    with serving(tmp_path / "log", *arguments, model=path) as server:
        first = server.engine.pid
        token_ids, error = _stream(server)
        # What came before the fault is right, and the client is told why there is no more.
        assert 0 < len(token_ids) <= FAULT_STEP
        assert token_ids == truth[: len(token_ids)]
        assert error.startswith(MESSAGES[kind])
        _wait_for_another_engine(server, first)
        answer = httpx.post(
            server.url + "/v1/completions", json={**REQUEST, "return_token_ids": True}, timeout=60
        )
        assert answer.json()["choices"][0]["token_ids"] == truth
        server.wait_idle()
        assert server.metric("cardan:engine_restarts_total") == 1


def _stream(server: Server) -> tuple[list[int], str]:
    """Token ids, and the message of the error that ends the stream."""
    token_ids: list[int] = []
    message = ""
    body = {**REQUEST, "stream": True, "return_token_ids": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as response:
        for line in response.iter_lines():
            if line == "data: [DONE]":
                return token_ids, message
            if line:
                event = json.loads(line.removeprefix("data: "))
                message = event.get("error", {}).get("message", message)
                for choice in event.get("choices", []):
                    token_ids += choice.get("token_ids") or []
    raise AssertionError("the stream had no end")


def _wait_for_another_engine(server: Server, first: int) -> None:
    deadline = time.monotonic() + 60
    while psutil.pid_exists(first) or server.get("/health").status_code != 200:
        assert time.monotonic() < deadline, server.log.read_text()
        time.sleep(0.1)
