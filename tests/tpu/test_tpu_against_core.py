"""Requests with settings of all kinds at once, on the tpu platform and on the core's own runner."""

import numpy as np
import pytest

from cardan import LLM, SamplingParams, TokenPrompt
from cardan.testing.tiny_models import make_tiny_model, prompt_ids

# Few blocks, rows and tokens a step: prompts are cut, requests preempted, rows used again.
SETTINGS = {
    "dtype": "float32",
    "max_model_len": 96,
    "num_blocks": 10,
    "block_size": 16,
    "max_num_seqs": 5,
    "max_num_batched_tokens": 24,
    "max_logprobs": -1,
}
VOCABULARY = 500
GAP = 1e-3


def prompt_of(rng):
    length = 95 if rng.random() < 0.15 else int(rng.integers(1, 60))
    ids = prompt_ids(length, seed=int(rng.integers(1000)))
    if rng.random() < 0.4:
        # Some of a prefix that others have, too.
        ids = (prompt_ids(40, seed=99) + ids)[: int(rng.integers(20, 80))]
    return TokenPrompt(token_ids=ids)


def params_of(rng, most_tokens):
    def ids(count):
        return [int(token) for token in rng.integers(0, VOCABULARY, count)]

    max_tokens = min(int(rng.integers(1, 40)), most_tokens)
    some = {
        "temperature": 0.0,
        "top_p": 0.8,
        "top_k": 20,
        "min_p": 0.05,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.6,
        "frequency_penalty": -0.5,
        "logprobs": int(rng.choice([-1, 0, 1, 3, 9])),
        "prompt_logprobs": int(rng.choice([-1, 0, 1, 3])),
        "min_tokens": int(rng.integers(0, max_tokens + 1)),
        "stop_token_ids": ids(100),
        "bad_words": [f"w{first} w{last}" for first, last in zip(ids(50), ids(50), strict=True)]
        + [f"w{token}" for token in ids(100)],
        "logit_bias": dict(zip(ids(9), rng.normal(0, 5, 9).tolist(), strict=True)),
        "allowed_token_ids": ids(40),
        "n": 3,
    }
    chosen = {name: value for name, value in some.items() if rng.random() < 0.3}
    return SamplingParams(max_tokens=max_tokens, seed=int(rng.integers(1000)), **chosen)


def check_tables(ours, theirs):
    for one, other in zip(ours or (), theirs or (), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert set(one) == set(other)
            assert max(abs(one[token].logprob - other[token].logprob) for token in one) < GAP


@pytest.mark.parametrize(
    ("seed", "count"),
    [(1, 9), *(pytest.param(seed, 16, marks=pytest.mark.scheduled) for seed in (1, 2))],
)
def test_all_settings_at_once(seed, count, tmp_path):
    rng = np.random.default_rng(seed)
    make_tiny_model("llama", tmp_path)
    prompts = [prompt_of(rng) for _ in range(count)]
    params = [params_of(rng, 96 - len(prompt.token_ids)) for prompt in prompts]
    found = {}
    for platform in ("tpu", "cpu"):
        with LLM(tmp_path, **SETTINGS, platform=platform) as llm:
            # The second time much of the prompts is cached.
            found[platform] = [*llm.generate(prompts, params), *llm.generate(prompts, params)]
            metrics = llm.get_metrics()
            assert metrics.num_preemptions > 0
            assert metrics.prefix_hits > 0
    for ours, theirs in zip(found["tpu"], found["cpu"], strict=True):
        check_tables(ours.prompt_logprobs, theirs.prompt_logprobs)
        for one, other in zip(ours.outputs, theirs.outputs, strict=True):
            assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)
            check_tables(one.logprobs, other.logprobs)
