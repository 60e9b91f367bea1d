"""What becomes of requests, and of the engine, when a step of the tpu platform goes wrong."""

import re
import shutil

import numpy as np
import pytest
from jax.errors import JaxRuntimeError
from safetensors.torch import load_file, save_file

from cardan import LLM, SamplingParams, TokenPrompt
from cardan.core.types.errors import RequestFailedError
from cardan.platforms.tpu.programs import Programs
from cardan.testing.conformance.model_truth import ModelTruth
from cardan.testing.tiny_models import prompt_ids

SETTINGS = {
    "platform": "tpu",
    "dtype": "float32",
    "max_model_len": 128,
    "num_blocks": 64,
    "max_num_seqs": 12,
    "max_num_batched_tokens": 64,
}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, seed=5, max_tokens=4, ignore_eos=True, n=3)
BAD = 7


@pytest.fixture(scope="module")
def truths(tmp_path_factory):
    made = {}

    def truth(name):
        if name not in made:
            made[name] = ModelTruth(name, tmp_path_factory.mktemp(name))
        return made[name]

    return truth


def prompt_of(length, seed=1):
    ids = [token if token != BAD else BAD + 1 for token in prompt_ids(length, seed=seed)]
    return TokenPrompt(token_ids=ids)


@pytest.fixture
def full_once(monkeypatch):
    """Lets a method of programs find the device full, as often as told; ``uses_up`` its state."""

    def arrange(name, times=1, uses_up=False):
        original = getattr(Programs, name)
        left = [times]

        def run(self, *args):
            if not left[0]:
                return original(self, *args)
            left[0] -= 1
            if uses_up:
                state = next(item for item in args if hasattr(item, "history"))
                state.history.delete()
            raise JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes.")

        monkeypatch.setattr(Programs, name, run)

    return arrange


@pytest.mark.parametrize("name", ["enter", "run", "copy_blocks"])
def test_a_full_device_ends_the_requests_of_the_step(name, truths, full_once):
    truth, prompt = truths("llama"), prompt_of(21)
    with LLM(truth.directory, **SETTINGS) as llm:
        [expected] = llm.generate(prompt, SAMPLED)
        full_once(name)
        with pytest.raises(RequestFailedError, match="a step did not fit: RESOURCE_EXHAUSTED"):
            llm.generate(prompt, SAMPLED)
        [output] = llm.generate(prompt, SAMPLED)
    assert [a.token_ids for a in output.outputs] == [a.token_ids for a in expected.outputs]


def test_what_entered_before_a_full_device_stays(truths, full_once):
    """Twelve rows enter in two parts, of which the second fails."""
    truth = truths("llama")
    with LLM(truth.directory, **SETTINGS) as llm:
        entered = Programs.enter
        calls = []

        def run(self, state, *args):
            calls.append(len(args[0]))
            if len(calls) == 2:
                raise JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes.")
            return entered(self, state, *args)

        prompts = [prompt_of(4, seed=i) for i in range(12)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Programs, "enter", run)
            with pytest.raises(RequestFailedError, match="a step did not fit"):
                llm.generate(prompts, GREEDY)
        assert calls[:2] == [8, 4]
        outputs = llm.generate(prompts, GREEDY)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert truth.greedy_fault(prompt.token_ids, output.outputs[0].token_ids, 1e-3) == ""


def test_a_program_that_cannot_be_compiled_ends_its_requests_alone(truths, monkeypatch):
    lowered = Programs.lowered

    def refused(self, shape, state):
        if shape.num_logprobs is not None:
            raise JaxRuntimeError("INTERNAL: Mosaic failed to compile TPU kernel")
        return lowered(self, shape, state)

    monkeypatch.setattr(Programs, "lowered", refused)
    truth, prompt = truths("llama"), prompt_of(9)
    with LLM(truth.directory, **SETTINGS) as llm:
        for _ in range(2):
            with pytest.raises(RequestFailedError, match="a step could not be compiled: INTERNAL"):
                llm.generate(prompt, GREEDY.replace(logprobs=1))
            [output] = llm.generate(prompt, GREEDY)
            answer = output.outputs[0].token_ids
            assert truth.greedy_fault(prompt.token_ids, answer, 1e-3) == ""


def test_a_lost_cache_is_told(truths, full_once):
    with LLM(truths("llama").directory, **SETTINGS) as llm:
        full_once("run", uses_up=True)
        with pytest.raises(RequestFailedError, match="the KV cache is lost, since a step did not"):
            llm.generate(prompt_of(5), GREEDY)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_bad_number_ends_its_request_alone(name, truths, tmp_path):
    """A token whose embedding is no number; of windowed models the prompt's last token does not see
    it. The core's own runner gives the same answers, and the same reason where it must: kernels
    that multiply what a window hides by zero have it in the last token's logits, others do not."""
    truth = truths(name)
    shutil.copytree(truth.directory, tmp_path / "bad")
    for file in (tmp_path / "bad").glob("*.safetensors"):
        tensors = load_file(file)
        tensors["model.embed_tokens.weight"][BAD] = float("nan")
        save_file(tensors, file, metadata={"format": "pt"})
    prompts = [prompt_of(length, seed=length) for length in (5, 50, 3)]
    prompts[1].token_ids[0] = BAD
    found = []
    for platform in ("tpu", "cpu"):
        with LLM(tmp_path / "bad", **{**SETTINGS, "platform": platform}) as llm:
            with pytest.raises(RequestFailedError) as failure:
                llm.generate(prompts[1], GREEDY)
            outputs = llm.generate([prompts[0], prompts[2]], GREEDY)
        found.append((str(failure.value), [output.outputs[0].token_ids for output in outputs]))
    (reason, answers), (core_reason, core_answers) = found
    assert answers == core_answers
    assert reason == core_reason or name == "mistral"
    for text in (reason, core_reason):
        assert re.match("the model's (logits|hidden states) hold NaN or infinity", text)


def test_answers_do_not_depend_on_who_enters_with_them(truths):
    """More rows than enter at once, of very different lengths; rows that others had before."""
    truth = truths("llama")
    rng = np.random.default_rng(3)
    with LLM(truth.directory, **SETTINGS) as llm:
        for _ in range(2):
            prompts = [prompt_of(int(n), seed=int(n)) for n in rng.integers(1, 120, 14)]
            for prompt, output in zip(prompts, llm.generate(prompts, GREEDY), strict=True):
                answer = output.outputs[0].token_ids
                assert truth.greedy_fault(prompt.token_ids, answer, 1e-3) == ""
