"""Several engines in one process, on the same platform and on two: each has its own."""

import pytest

from cardan.bootstrap.engine_builder import build_engine
from cardan.core.types.request import EngineRequest
from cardan.core.types.sampling_params import SamplingParams
from cardan.llm import LLM, config_from_settings
from cardan.testing.fake.settings import VARIABLE
from cardan.testing.tiny_models import make_tiny_model, prompt_ids

NUM_TOKENS = 6
SETTINGS = {"dtype": "float32", "max_num_seqs": 3, "num_blocks": 24, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two models, the first seeded prompts of which have other answers."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("llama", "qwen3")}
    for name, folder in folders.items():
        make_tiny_model(name, folder)
    return {name: str(folder) for name, folder in folders.items()}


class Lane:
    """An engine that is stepped by hand."""

    def __init__(self, folder, platform):
        threads = {"num_threads": 1} if platform == "cpu" else {}
        config = config_from_settings(folder, {**SETTINGS, **threads, "platform": platform})
        self.parts = build_engine(config)
        self.engine, self.executor = self.parts.engine, self.parts.engine._executor
        self.tokens = {}

    def add(self, key, prompt):
        params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        self.engine.add(
            EngineRequest(
                key=key,
                request_id=str(key),
                prompt_token_ids=prompt,
                params=params,
                max_tokens=NUM_TOKENS,
                arrival_time=0.0,
            )
        )

    def step(self):
        outputs = self.engine.step()
        for key, token_id in zip(outputs.keys, outputs.token_ids, strict=True):
            self.tokens.setdefault(key, []).append(token_id)

    def run(self):
        while self.engine.has_work:
            self.step()

    @property
    def kv_bytes(self):
        return self.executor._parts.device.memory.stats().by_tag["kv"]

    def close(self):
        self.parts.close("done")


def alone(folder, platform, prompts):
    lane = Lane(folder, platform)
    try:
        for key, prompt in enumerate(prompts):
            lane.add(key, prompt)
        lane.run()
        return lane.tokens
    finally:
        lane.close()


@pytest.mark.parametrize(
    "places",
    [
        [("llama", "cpu"), ("qwen3", "cpu")],
        [("llama", "fake:1"), ("qwen3", "cpu")],
    ],
)
def test_steps_of_two_engines_take_turns(models, monkeypatch, places):
    monkeypatch.setenv(VARIABLE, "graphs=decode num_devices=2")
    prompts = [prompt_ids(length, length) for length in (3, 25, 17)]
    truth = [alone(models[name], platform, prompts) for name, platform in places]
    one, two = lanes = [Lane(models[name], platform) for name, platform in places]
    try:
        for lane in lanes:
            for key, prompt in enumerate(prompts[:2]):
                lane.add(key, prompt)
        for _ in range(4):
            one.step()
            two.step()
        kv_bytes = two.kv_bytes
        assert one.executor._pools[0] is not two.executor._pools[0]
        for lane in lanes:
            lane.add(2, prompts[2])
        one.run()
        assert one.tokens == truth[0]
        two.step()
        one.close()
        assert two.kv_bytes == kv_bytes > 0
        two.run()
        assert two.tokens == truth[1]
        # And a third one, where the first was.
        assert alone(models[places[0][0]], places[0][1], prompts) == truth[0]
        two.add(9, prompts[0])
        two.run()
        assert two.tokens[9] == truth[1][0]
    finally:
        two.close()


def test_two_llms_on_threads_of_their_own(models, monkeypatch):
    monkeypatch.setenv(VARIABLE, "")
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt_ids(9)}] * 2

    def ask(llm):
        found = llm.generate(prompts, params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in found]

    with LLM(models["qwen3"], platform="cpu", num_threads=1, **SETTINGS) as two:
        with LLM(models["llama"], platform="cpu", num_threads=1, **SETTINGS) as one:
            first, second = ask(one), ask(two)
            one.sleep(2)
            assert ask(two) == second
            one.wake_up()
            assert ask(one) == first
        assert ask(two) == second
    assert first != second
