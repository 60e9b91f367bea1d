import random
import subprocess
import sys
import textwrap

import pytest

from cardan import LLM, SamplingParams
from cardan.core.interfaces.errors import ConfigError, OutOfMemoryError, UnsupportedError
from cardan.core.types.errors import InputError, RequestFailedError
from cardan.testing.digest_engine import VOCAB_SIZE, DigestEngine, digest_answer, digest_request
from cardan.testing.fake.platform import FakePlatform
from cardan.testing.fake.settings import FakeSettings
from cardan.testing.fake.step_faults import DIE_STATUS
from cardan.testing.tiny_models import make_tiny_model, prompt_ids


def digest(**values):
    return FakeSettings(tier="executor", model="digest", **values)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_tokens_are_those_of_the_definition(depth):
    draw = random.Random(depth)
    fake = DigestEngine(digest(depth=depth), budget=24)
    lengths = [draw.randrange(1, 70) for _ in range(30)]
    prompts = [[draw.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]
    seeds = [None if place % 2 else place * 10**6 - 7 for place in range(30)]
    tokens, finished = fake.run(
        [
            digest_request(place, prompt, 20, seed)
            for place, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
        ]
    )
    for place, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
        assert tokens[place] == digest_answer(prompt, 20, seed)
        assert finished[place].reason == "length"
    assert not any(fake.idle_facts().values()), fake.idle_facts()


@pytest.mark.parametrize("depth", [0, 1])
def test_preempted_shared_and_copied_blocks(depth):
    fake = DigestEngine(digest(depth=depth), num_blocks=14, budget=40)
    prefix = list(range(40))
    requests = [digest_request(place * 10, [*prefix, place], 40) for place in range(6)]
    requests.append(digest_request(100, prefix, 30, seed=5, n=3))
    tokens, _ = fake.run(requests)
    for place in range(6):
        assert tokens[place * 10] == digest_answer([*prefix, place], 40)
    for index in range(3):
        assert tokens[100 + index] == digest_answer(prefix, 30, seed=5 + index)
    assert not any(fake.idle_facts().values()), fake.idle_facts()


def test_a_wrong_block_shows():
    fake = DigestEngine(digest())
    fake.engine.add(digest_request(0, list(range(40)), 10))
    answer = []
    for _ in range(30):
        answer += fake.engine.step().token_ids
        if len(answer) == 3:
            fake.device.queue.submit(lambda: fake.executor._model._memory.fill(7))
            fake.device.queue.drain()
    truth = digest_answer(list(range(40)), 10)
    assert answer[:3] == truth[:3]
    assert answer[-4:] != truth[-4:]


def test_the_budget_of_memory_holds():
    with pytest.raises(OutOfMemoryError, match=r"kv need .* MiB, the fake device has 0.0 MiB free"):
        DigestEngine(digest(memory_mb=0))
    fake = DigestEngine(digest(memory_mb=1))
    assert fake.device.memory.stats().by_tag["kv"] == fake.cache.config.num_bytes
    assert fake.device.memory_info().free == (1 << 20) - fake.cache.config.num_bytes
    fake.executor.close()
    assert fake.device.memory_info().free == 1 << 20


def test_faults_of_steps_reach_the_engine():
    for kind, error, text in (
        ("raise", RuntimeError, "step 5 failed"),
        ("oom", OutOfMemoryError, "out of memory in step 5"),
    ):
        fake = DigestEngine(FakeSettings.parse(f"tier=executor model=digest fault={kind}@5"))
        with pytest.raises(error, match=text):
            fake.run([digest_request(0, [1, 2, 3], 20)])
        fake.executor.close()


def test_a_stuck_step_ends_with_the_device():
    fake = DigestEngine(FakeSettings.parse("tier=executor model=digest fault=stuck@0 depth=1"))
    fake.engine.add(digest_request(0, [1], 5))
    plan = fake.scheduler.schedule()
    fake.executor.forward(plan)
    handle = fake.executor.sample(plan)
    assert not handle.done()
    fake.device.close()
    with pytest.raises(RuntimeError, match=r"closed (while|before)"):
        handle.result()


def test_a_dying_device_takes_the_process(tmp_path):
    code = """
        from cardan.testing.digest_engine import DigestEngine, digest_request
        from cardan.testing.fake.settings import FakeSettings
        DigestEngine(FakeSettings.parse("tier=executor model=digest fault=die@3")).run(
            [digest_request(0, [1], 9)]
        )
    """
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        timeout=60,
        check=False,
    )
    assert found.returncode == DIE_STATUS


def test_a_fault_with_a_marker_happens_once(tmp_path):
    marker = tmp_path / "happened"
    text = f"tier=executor model=digest fault=raise@2 marker={marker}"
    fake = DigestEngine(FakeSettings.parse(text))
    with pytest.raises(RuntimeError, match="step 2 failed"):
        fake.run([digest_request(0, [1], 9)])
    assert marker.exists()
    again = DigestEngine(FakeSettings.parse(text))
    tokens, _ = again.run([digest_request(0, [1], 9)])
    assert tokens[0] == digest_answer([1], 9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tier=gpu", "tier must be one of kernel, executor"),
        ("depth=deep", "depth must be a number"),
        ("depth=-1", "depth must be at least 0"),
        ("static=yes", "static must be 0 or 1"),
        ("speed=3", "'speed=3' is no setting; there are: depth, fault,"),
        ("fault=gremlins", "fault=gremlins is none of wrong_op,"),
        ("fault=raise", "slow, stuck, raise, oom, die with @STEP"),
    ],
)
def test_wrong_settings_are_named(text, message):
    with pytest.raises(ConfigError, match=message):
        FakeSettings.parse(text)


def test_settings_from_the_environment():
    assert FakeSettings.from_env({}) is None
    assert FakeSettings.from_env({"CARDAN_FAKE": "1"}) == FakeSettings()
    text = "step_ms=2.5 depth=2 static=1 fault=wrong_mask fault=slow@7 fault=leak"
    settings = FakeSettings.from_env({"CARDAN_FAKE": text})
    assert (settings.step_ms, settings.depth, settings.static) == (2.5, 2, True)
    assert settings.faults == {"wrong_mask", "leak"}
    assert [(item.kind, item.step) for item in settings.step_faults] == [("slow", 7)]


def test_the_executor_cannot_act_out_kernel_faults():
    platform = FakePlatform(digest(faults=frozenset({"wrong_mask"})))
    device = platform.open(platform.devices()[0])
    with pytest.raises(ConfigError, match="cannot act out fault=wrong_mask"):
        platform.executor(device, None, None)
    with pytest.raises(UnsupportedError, match="belong to its executor"):
        device.memory.kv_pool(None, None, 2)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    return path, make_tiny_model("llama", path)


@pytest.mark.parametrize("depth", [0, 1])
def test_whole_engine_answers_like_transformers(tiny, monkeypatch, depth):
    import torch

    path, model = tiny
    monkeypatch.setenv("CARDAN_FAKE", f"tier=executor depth={depth}")
    prompts = [prompt_ids(length, seed=length) for length in (1, 9, 33, 60)]
    with LLM(str(path), platform="fake", max_num_batched_tokens=32) as llm:
        assert llm.info.platform == "fake"
        params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=2)
        answers = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
        for ids, answer in zip(prompts, answers, strict=True):
            with torch.inference_mode():
                whole = model.generate(
                    torch.tensor([ids]), max_new_tokens=16, do_sample=False, eos_token_id=None
                )[0].tolist()
                truth = torch.log_softmax(model(torch.tensor([whole])).logits[0].double(), -1)
            assert answer.outputs[0].token_ids == whole[len(ids) :]
            for place, table in enumerate(answer.outputs[0].logprobs):
                token_id = whole[len(ids) + place]
                expected = truth[len(ids) + place - 1, token_id].item()
                assert table[token_id].logprob == pytest.approx(expected, abs=1e-4)
        with pytest.raises(RequestFailedError, match="does not sample with top_p"):
            llm.generate([[5]], SamplingParams(top_p=0.5, max_tokens=2))
        with pytest.raises(InputError, match="computes no prompt_logprobs"):
            llm.generate([[5]], SamplingParams(prompt_logprobs=1, max_tokens=2))
