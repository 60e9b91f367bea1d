"""The demo model on the tpu platform, compiled by XLA for the host, through the server.

jax is in an environment of its own, on whose interpreter the engine runs.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
from prompts import NUM_TOKENS
from server_process import Server, serving

pytestmark = [pytest.mark.model, pytest.mark.slow]

PYTHON = Path(__file__).parents[2] / ".venv-tpu" / "bin" / "python"
# Requests at a time: more than there are rows, so that some wait.
CLIENTS = 12


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("tpu") / "log"
    arguments = ("--platform", "tpu", "--engine-python", str(PYTHON), "--max-model-len", "256")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CARDAN_TPU_HOST", "1")
        with serving(log, *arguments, "--dtype", "float32", patience=200) as server:
            yield server


def streamed(server: Server, prompt: list[int]) -> tuple[str, list[int]]:
    """Text and token ids of a greedy answer, put together from its chunks."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=250)
    stream = client.completions.create(
        model="demo",
        prompt=prompt,
        max_tokens=NUM_TOKENS,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    text, ids = "", []
    for chunk in stream:
        for choice in chunk.choices:
            text += choice.text
            ids += getattr(choice, "token_ids", None) or []
    return text, ids


def test_greedy_answers_equal_transformers(server: Server, greedy_truth, hf) -> None:
    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = list(pool.map(lambda pair: streamed(server, pair[0]), greedy_truth))
    assert [ids for _, ids in answers] == [expected for _, expected in greedy_truth]
    for (text, _), (_, expected) in zip(answers, greedy_truth, strict=True):
        truth = hf.tokenizer.decode(expected, skip_special_tokens=True)
        assert truth.startswith(text.rstrip("\ufffd"))
    server.wait_idle()


def test_a_client_that_goes_leaves_nothing(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=100)
    stream = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "Count to a hundred."}],
        max_tokens=200,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    stream.close()
    server.wait_idle()


def test_refuses_what_it_cannot_do(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    foreign = {"extra_args": {"no_repeat_ngram": 2}}
    with pytest.raises(openai.BadRequestError, match="extra_args"):
        client.completions.create(model="demo", prompt="x", max_tokens=1, extra_body=foreign)
