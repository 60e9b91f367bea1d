"""Steps whose last layer goes on with each row's last token alone."""

import pytest
import torch

from cardan.bootstrap.engine_builder import build_engine
from cardan.core.interfaces.errors import UnsupportedError
from cardan.core.runner.step_handle import DeviceStepHandle
from cardan.core.types.request import EngineRequest
from cardan.core.types.sampling_params import SamplingParams
from cardan.llm import config_from_settings
from cardan.testing.fake.memory import FakeMemory
from cardan.testing.fake.settings import VARIABLE
from cardan.testing.tiny_models import make_tiny_model, prompt_ids

LENGTHS = (3, 30, 1, 45, 9)
NUM_TOKENS = 4
BAD_TOKEN = 97


class Runs:
    """An engine on the CPU, and how many rows its last layer's MLP was given in each step."""

    def __init__(self, directory, **settings):
        settings = {
            "platform": "cpu", "dtype": "float32", "max_num_seqs": 5, "num_blocks": 64,
            "max_num_batched_tokens": 64, "enable_prefix_caching": False, **settings,
        }  # fmt: skip
        parts = build_engine(config_from_settings(str(directory), settings))
        self.engine, self.close = parts.engine, parts.close
        self.model = parts.engine._executor._model
        self.widths = []
        mlp = self.model.layers[-1].mlp
        mlp.register_forward_pre_hook(lambda module, inputs: self.widths.append(len(inputs[0])))

    def add(self, key, prompt, **params):
        params = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, **params}
        request = EngineRequest(
            key=key, request_id=str(key), prompt_token_ids=prompt, params=SamplingParams(**params),
            max_tokens=params["max_tokens"], arrival_time=0.0,
        )  # fmt: skip
        self.engine.add(request)

    def tokens(self, num_requests):
        """Those that are still to come for each request, or what went wrong."""
        tokens = {key: [] for key in range(num_requests)}
        while self.engine.has_work:
            outputs = self.engine.step()
            for key, token_id in zip(outputs.keys, outputs.token_ids, strict=True):
                tokens[key].append(token_id)
            for key, end in outputs.finished.items():
                if end.message is not None:
                    tokens[key] = end.message
        return list(tokens.values())

    def run(self, prompts, **params):
        """The tokens of each prompt, or what went wrong."""
        for key, prompt in enumerate(prompts):
            self.add(key, prompt, **params)
        return self.tokens(len(prompts))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    directory = tmp_path_factory.mktemp("llama")
    return directory, make_tiny_model("llama", directory)


@pytest.fixture
def start():
    opened = []

    def build(directory, **settings):
        opened.append(Runs(directory, **settings))
        return opened[-1]

    yield build
    for runs in opened:
        runs.close("the test is over")


@torch.inference_mode()
def greedy(model, prompt):
    tokens = list(prompt)
    for _ in range(NUM_TOKENS):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("eager", [True, False])
def test_the_last_mlp_sees_a_token_of_each_row(start, llama, eager):
    directory, model = llama
    runs = start(directory, max_num_batched_tokens=256, enforce_eager=eager)
    prompts = [prompt_ids(length, length) for length in LENGTHS]
    assert runs.run(prompts) == [greedy(model, prompt) for prompt in prompts]
    assert max(runs.widths) == len(LENGTHS)


def test_all_tokens_of_prompts_whose_logprobs_are_wanted(start, llama):
    runs = start(llama[0], max_num_batched_tokens=256)
    runs.run([prompt_ids(length, length) for length in LENGTHS], prompt_logprobs=0)
    assert max(runs.widths) == sum(LENGTHS)


def test_prompts_beside_an_answer_whose_prompt_logprobs_were_given(start, llama):
    """Once they are given, the answer is a row like others."""
    runs = start(llama[0], max_num_batched_tokens=256)
    runs.add(0, prompt_ids(30, 30), prompt_logprobs=0, max_tokens=20)
    while not runs.widths:
        runs.engine.step()
    assert runs.widths == [30]
    runs.engine.step()
    runs.add(1, prompt_ids(45, 45))
    assert runs.tokens(2)[1] == greedy(llama[1], prompt_ids(45, 45))
    assert max(runs.widths[1:]) == 2


def test_a_model_whose_last_layer_has_a_window_keeps_all_tokens(start, tmp_path):
    model = make_tiny_model("mistral", tmp_path)
    assert model.config.sliding_window
    runs = start(tmp_path, max_num_batched_tokens=256)
    prompts = [prompt_ids(length, length) for length in LENGTHS]
    assert runs.run(prompts) == [greedy(model, prompt) for prompt in prompts]
    assert max(runs.widths) == sum(LENGTHS)


@pytest.mark.parametrize("place", [0, 5, 15, 16, 31, 39])
def test_a_bad_token_in_any_chunk_fails_its_request_alone(start, llama, place):
    """Its keys and values, which nobody else has read yet, show in the chunk's last token."""
    runs = start(llama[0], max_num_batched_tokens=24, long_prefill_token_threshold=16)
    runs.model.embed_tokens.register_forward_hook(
        lambda module, inputs, output: output.masked_fill(
            (inputs[0] == BAD_TOKEN)[:, None], torch.nan
        )
    )
    sound = [token for token in prompt_ids(40, 1) if token != BAD_TOKEN]
    bad = list(sound)
    bad[place] = BAD_TOKEN
    truth = greedy(llama[1], sound)
    found = runs.run([sound, bad, sound])
    assert found[0] == found[2] == truth
    assert "not finite" in found[1] or "NaN" in found[1]


def test_a_replay_flags_nobody_of_the_step_before(start, llama, monkeypatch):
    """Without page-locked memory results are read after the next step, which has other rows."""

    def refuse(memory, num_bytes, pinned=True):
        raise UnsupportedError("this device offers no host pool")

    monkeypatch.setattr(FakeMemory, "host_pool", refuse)
    monkeypatch.setenv(VARIABLE, "graphs=full depth=1")
    runs = start(llama[0], platform="fake", long_prefill_token_threshold=16)
    device, usual = runs.engine._executor._parts.device, DeviceStepHandle.result

    def late(handle):
        device.synchronize()  # the next step has run, too
        return usual(handle)

    monkeypatch.setattr(DeviceStepHandle, "result", late)
    with torch.inference_mode():
        runs.model.embed_tokens.method.table[BAD_TOKEN] = torch.nan
    sound = [token for token in prompt_ids(70, 1) if token != BAD_TOKEN][:60]
    bad = list(sound)
    bad[40] = BAD_TOKEN
    # The first one ends in the second step; the bad token takes its place in the third.
    found = runs.run([sound[:20], bad, sound, sound], max_tokens=1)
    assert found[0] == greedy(llama[1], sound[:20])[:1]
    assert "not finite" in found[1] or "NaN" in found[1]
    assert found[2] == found[3] == greedy(llama[1], sound)[:1]
