"""Log-probabilities of prompts on the tpu platform, against transformers and the core's runner."""

import numpy as np
import pytest

from cardan import LLM, SamplingParams, TokenPrompt
from cardan.platforms.tpu import programs
from cardan.testing.conformance.model_truth import ModelTruth
from cardan.testing.tiny_models import prompt_ids

GAP = 1e-3
SETTINGS = {
    "platform": "tpu",
    "dtype": "float32",
    "max_model_len": 128,
    "num_blocks": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "max_logprobs": -1,
}
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def truths(tmp_path_factory):
    made = {}

    def truth(name):
        if name not in made:
            made[name] = ModelTruth(name, tmp_path_factory.mktemp(name))
        return made[name]

    return truth


def prompts_of(*lengths):
    return [TokenPrompt(token_ids=prompt_ids(length, seed=length)) for length in lengths]


# The last layer of gemma3's and of windowed models does not let steps go on with fewer tokens.
@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("llama", 1),
        ("qwen3_windows", 2),
        *(
            pytest.param(name, ranks, marks=pytest.mark.scheduled)
            for name, ranks in (("llama", 2), ("qwen3_windows", 1))
        ),
    ],
)
def test_are_transformers(name, ranks, truths):
    """Of prompts of one token, of a chunk, and of several; beside answers, and cached."""
    truth, prompts = truths(name), prompts_of(1, 17, 90, 33, 2)
    with LLM(truth.directory, **SETTINGS, tensor_parallel_size=ranks) as llm:
        for _ in range(2):
            params = [GREEDY.replace(prompt_logprobs=k) for k in (2, 4, 9, 3, 1)]
            for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
                assert truth.greedy_fault(prompt.token_ids, output.outputs[0].token_ids, GAP) == ""
                assert (
                    truth.prompt_logprobs_fault(prompt.token_ids, output.prompt_logprobs, GAP) == ""
                )


@pytest.mark.parametrize("part", [4, pytest.param(256, marks=pytest.mark.scheduled)])
def test_are_the_cores(part, truths, monkeypatch):
    """Tables of none, few and all tokens, in one batch with requests that want none, whose parts do
    not divide the step."""
    monkeypatch.setattr(programs, "_PROMPT_LOGITS_ROWS", part)
    prompts = prompts_of(40, 9, 61, 20, 7)
    sizes = [(0, None), (None, 3), (-1, 0), (4, -1), (None, None)]
    params = [
        GREEDY.replace(prompt_logprobs=prompt, logprobs=answer, max_tokens=tokens)
        for (prompt, answer), tokens in zip(sizes, (3, 4, 0, 6, 2), strict=True)
    ]
    found = []
    for platform in ("tpu", "cpu"):
        with LLM(truths("llama").directory, **{**SETTINGS, "platform": platform}) as llm:
            found.append(llm.generate(prompts, params))
    for ours, theirs in zip(*found, strict=True):
        for one, other in (
            (ours.prompt_logprobs, theirs.prompt_logprobs),
            (ours.outputs[0].logprobs, theirs.outputs[0].logprobs),
        ):
            same_tables(one, other)


def same_tables(ours, theirs):
    assert (ours is None) == (theirs is None)
    for one, other in zip(ours or (), theirs or (), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert set(one) == set(other)
            for token in one:
                assert abs(one[token].logprob - other[token].logprob) < GAP


def test_after_a_preemption(truths):
    """Positions that were told before are computed again, and told once."""
    prompts = prompts_of(40, 37, 35)
    params = GREEDY.replace(max_tokens=60, prompt_logprobs=2)
    # Two prompts fit, and not all of their answers.
    with LLM(truths("llama").directory, **{**SETTINGS, "num_blocks": 7}) as llm:
        outputs = llm.generate(prompts, params)
        assert llm.get_metrics().num_preemptions > 0
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output.prompt_logprobs) == len(prompt.token_ids)
        fault = truths("llama").prompt_logprobs_fault(prompt.token_ids, output.prompt_logprobs, GAP)
        assert fault == ""


def test_samples_tell_their_prompt_once(truths):
    [prompt] = prompts_of(21)
    params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=4, prompt_logprobs=1)
    with LLM(truths("llama").directory, **SETTINGS) as llm:
        [output] = llm.generate(prompt, params)
    assert len(output.prompt_logprobs) == 21
    values = [next(iter(table.values())).logprob for table in output.prompt_logprobs[1:]]
    assert np.isfinite(values).all()
