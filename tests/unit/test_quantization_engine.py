"""``--quantization`` through the whole engine, on a tiny model."""

import logging

import pytest

from cardan import LLM, ConfigError, SamplingParams
from cardan.testing.tiny_models import make_tiny_model, prompt_ids

COMMON = {
    "dtype": "float32",
    "max_model_len": 64,
    "kv_cache_memory_bytes": 1 << 20,
    "platform": "cpu",
}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": prompt_ids(length, seed=length)} for length in (3, 17)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    made = tmp_path_factory.mktemp("llama")
    make_tiny_model("llama_tied_biased", made)
    return str(made)


def answers(directory, **changes):
    with LLM(directory, **{**COMMON, **changes}) as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def plain(directory):
    return answers(directory)


def test_none_is_full_precision(directory, plain):
    assert answers(directory, quantization="none") == plain


@pytest.mark.parametrize("name", ["q8", "q4", "int8"])
def test_schemes_answer_and_tell(name, directory, plain, caplog):
    caplog.set_level(logging.INFO, logger="cardan.engine")
    found = answers(directory, quantization=name)
    assert [len(tokens) for tokens in found] == [8, 8]
    # The first token is the least disturbed.
    if name != "q4":
        assert [tokens[0] for tokens in found] == [tokens[0] for tokens in plain]
    assert f"quantization {name}: layers quantised: " in caplog.text


def test_dummy_weights(directory):
    found = answers(directory, quantization="q4", load_format="dummy")
    assert [len(tokens) for tokens in found] == [8, 8]


def test_an_unknown_scheme_is_refused(directory):
    message = r"model.quantization: no scheme named 'awq' \(installed: gguf, int8, q4, q8, none\)"
    with pytest.raises(ConfigError, match=message):
        answers(directory, quantization="awq")


def test_platforms_that_run_whole_steps_refuse_schemes(directory, monkeypatch):
    monkeypatch.setenv("CARDAN_FAKE", "tier=executor")
    with pytest.raises(ConfigError, match="platform fake runs whole steps and stores weights"):
        answers(directory, quantization="q8", platform="fake")
