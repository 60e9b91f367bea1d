"""How much memory the KV cache gets where a device says what steps take: against plain arithmetic,
and against what the steps of a busy engine take."""

import itertools

import pytest
import torch
from fake_devices import open_fake

from cardan.bootstrap.engine_builder import build_engine
from cardan.core.interfaces.errors import ConfigError, OutOfMemoryError
from cardan.core.kvcache.sizing import fit_model_len, size_cache
from cardan.core.runner.graphs import GraphManager
from cardan.core.runner.rehearsal import StepLimits, largest_step, longest_prompt
from cardan.core.types.request import EngineRequest
from cardan.core.types.sampling_params import SamplingParams
from cardan.llm import config_from_settings
from cardan.testing.fake.memory import FakeMemory
from cardan.testing.fake.settings import VARIABLE
from cardan.testing.tiny_models import make_tiny_model, prompt_ids

MIB = 1 << 20
SETTINGS = {
    "platform": "fake",
    "dtype": "float32",
    "max_num_seqs": 5,
    "max_num_batched_tokens": 64,
    "memory_utilization": 0.9,
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    directory = tmp_path_factory.mktemp("llama")
    make_tiny_model("llama", directory)
    return str(directory)


class Rig:
    """An engine on a fake device, and its parts."""

    def __init__(self, parts):
        self.engine, self.info, self.close = parts.engine, parts.info, parts.close
        self.executor = parts.engine._executor
        self.runner = self.executor._runner
        self.memory = self.executor._parts.device.memory
        self.specs = self.executor.kv_specs()
        self.block_bytes = parts.info.kv_cache_bytes // parts.info.num_blocks

    @property
    def free(self):
        return self.executor._parts.device.memory_info().free


def build(llama, fake, **settings):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, fake)
        return Rig(build_engine(config_from_settings(llama, {**SETTINGS, **settings})))


@pytest.fixture
def start(llama):
    """Builds engines, and closes them."""
    rigs = []
    yield lambda *args, **settings: rigs.append(build(llama, *args, **settings)) or rigs[-1]
    for rig in rigs:
        rig.close("the test is over")


@pytest.fixture(scope="module")
def rig(llama):
    """An engine whose memory may be asked about again and again."""
    shared = build(llama, "memory_mb=48", num_blocks=12)
    yield shared
    shared.close("the tests are over")


@pytest.fixture
def script(monkeypatch):
    """Makes the device say that steps and graphs take so many bytes."""

    def write(step_bytes, graph_bytes=0):
        def peak_of(self, work):
            work()
            return step_bytes

        monkeypatch.setattr(FakeMemory, "peak_of", peak_of)
        monkeypatch.setattr(GraphManager, "estimate", lambda *_: graph_bytes)

    return write


# -- the plan of the largest step -------------------------------------------------------------


def test_the_largest_step_is_as_large_as_limits_allow():
    for tokens, rows, length in itertools.product((1, 2, 7, 64), (1, 3, 8), (1, 2, 5, 300)):
        plan = largest_step(StepLimits(tokens, rows, length, 2), num_groups=2)
        counts, computed = plan.num_scheduled_tokens, plan.num_computed_tokens
        longest = max(1, length - 1)
        # Brute force: tokens dealt out one by one to whoever still has room.
        dealt = [1] * min(rows, tokens)
        for place in range(len(dealt)):
            while sum(dealt) < tokens and dealt[place] < longest:
                dealt[place] += 1
        assert counts.tolist() == dealt
        assert (counts + computed).tolist() == [longest, *dealt[1:]]
        assert plan.samples.all() == (length > 1)
        for row, new in enumerate(plan.new_rows):
            assert len(new.token_ids) == counts[row] + computed[row]
            assert len(new.block_ids) == 2
            # What is sampled has a place behind the known tokens.
            assert length == 1 or len(new.token_ids) < length


def test_the_longest_prompt_is_new_and_follows_the_largest_step():
    for tokens, rows, length in itertools.product((1, 7, 64), (1, 3, 8), (1, 2, 5, 300)):
        limits = StepLimits(tokens, rows, length, 2)
        plan = longest_prompt(limits, num_groups=2)
        assert plan.freed_rows == largest_step(limits, num_groups=2).rows.tolist()
        assert plan.num_scheduled_tokens.tolist() == [min(tokens, max(1, length - 1))]
        assert plan.num_computed_tokens.tolist() == [0]
        assert plan.samples.tolist() == [length > 1]
        (new,) = plan.new_rows
        assert len(new.token_ids) == new.num_prompt_tokens == plan.num_scheduled_tokens[0]


# -- the arithmetic ---------------------------------------------------------------------------


@pytest.mark.parametrize("utilization", [0.2, 0.5, 1.0])
@pytest.mark.parametrize("need", [(0, 0), (3 * MIB + 17, 0), (MIB, 2 * MIB + 1)])
def test_the_pool_gets_what_is_left(rig, script, utilization, need):
    script(*need)
    budget = rig.executor.available_kv_bytes(utilization)
    config = size_cache(rig.specs, budget, None, 10**6)
    usable = int(rig.free * utilization)
    fitting = [n for n in range(2, 10_000) if n * rig.block_bytes + sum(need) <= usable]
    assert config.num_blocks == max(fitting)


@pytest.mark.parametrize("utilization", [0.3, 1.0])
def test_a_device_that_cannot_tell_gets_a_share_as_ever(rig, utilization):
    assert rig.executor.available_kv_bytes(utilization) == int(rig.free * utilization)


def test_a_given_size_is_taken_without_a_rehearsal(start, script):
    script(1 << 40)
    assert start("memory_mb=48", kv_cache_memory_bytes=MIB).info.kv_cache_bytes <= MIB
    assert start("memory_mb=48", num_blocks=9).info.num_blocks == 9


# -- what does not fit ------------------------------------------------------------------------

REMEDIES = ("--max-num-batched-tokens", "--max-num-seqs", "--memory-utilization")


def check_remedies(caught, *more):
    assert all(word in str(caught.value) for word in (*REMEDIES, *more))


def test_no_room_beside_the_largest_step(start, script):
    script(30 * MIB, 20 * MIB)
    with pytest.raises(ConfigError, match="no room for a KV cache: of") as caught:
        start("memory_mb=48")
    text = str(caught.value)
    assert "a step of 64 tokens and 5 sequences takes 30.0 MiB, graphs about 20.0 MiB" in text
    assert "(memory_utilization 0.9)" in text
    check_remedies(caught, "--max-model-len")


def test_no_room_for_blocks_or_a_whole_request(rig, script):
    script(rig.free - 2 * rig.block_bytes + 1)
    budget = rig.executor.available_kv_bytes(1.0)
    assert budget == 2 * rig.block_bytes - 1
    with pytest.raises(ConfigError, match="no room for a KV cache: one block") as caught:
        size_cache(rig.specs, budget, None, 10**6)
    check_remedies(caught)
    script(rig.free - 5 * rig.block_bytes)
    config = size_cache(rig.specs, rig.executor.available_kv_bytes(1.0), None, 10**6)
    assert config.num_blocks == 5
    with pytest.raises(ConfigError, match="a context of 128 tokens needs a KV cache") as caught:
        fit_model_len(config, 128, explicit=True)
    check_remedies(caught, "--max-model-len")


def test_a_step_that_does_not_fit_at_all(rig, monkeypatch):
    def peak_of(self, work):
        raise OutOfMemoryError("48 MiB are all there is")

    monkeypatch.setattr(FakeMemory, "peak_of", peak_of)
    with pytest.raises(OutOfMemoryError, match="48 MiB are all there is") as caught:
        rig.executor.available_kv_bytes(0.9)
    assert "a step of 64 tokens and 5 sequences does not fit" in str(caught.value)
    check_remedies(caught, "--max-model-len")


# -- the rehearsal ----------------------------------------------------------------------------


def run_busy(engine):
    """Prompts in chunks beside answers, with all settings that cost memory."""
    params = SamplingParams(
        temperature=0.8, top_p=0.9, top_k=20, repetition_penalty=1.2, logprobs=20,
        prompt_logprobs=20, max_tokens=3, ignore_eos=True,
    )  # fmt: skip
    lengths = (60, 3, 124, 1)
    for key, length in enumerate(lengths):
        request = EngineRequest(
            key=key, request_id=str(key), prompt_token_ids=prompt_ids(length, length),
            params=params, max_tokens=3, arrival_time=0.0,
        )  # fmt: skip
        engine.add(request)
    ends = []
    while engine.has_work:
        ends += engine.step().finished.values()
    assert len(ends) == len(lengths)
    assert all(end.message is None for end in ends)


@pytest.mark.parametrize(
    ("fake", "settings"),
    [
        ("graphs=full memory_mb=48", {"memory_utilization": 1.0}),
        ("memory_mb=32", {"max_num_batched_tokens": 17, "max_num_seqs": 3}),
    ],
)
def test_what_was_left_out_is_enough_for_graphs_and_steps(start, monkeypatch, fake, settings):
    peaks, estimates = [], []
    measure, estimate = FakeMemory.peak_of, GraphManager.estimate

    def noted(notes, call):
        return lambda *args: notes.append(call(*args)) or notes[-1]

    monkeypatch.setattr(FakeMemory, "peak_of", noted(peaks, measure))
    monkeypatch.setattr(GraphManager, "estimate", noted(estimates, estimate))
    rig = start(f"peak=1 depth=0 {fake}", **settings)
    (rehearsed,), (estimated,) = peaks, estimates
    assert rig.runner.num_live_rows == 0
    assert rig.runner.graphs.num_bytes <= estimated <= 2 * rig.runner.graphs.num_bytes
    by_tag = rig.memory.stats().by_tag
    assert set(by_tag) <= {"weights", "kv", "graphs"}
    # The buffers that stay are in the rehearsed figure alone.
    assert 0 < measure(rig.memory, lambda: run_busy(rig.engine)) <= rehearsed
    total = int(fake.rpartition("=")[2]) * MIB
    assert sum(by_tag.values()) + rehearsed <= total


def test_the_recorded_peak_is_the_largest_sum_of_what_lives_at_once():
    device = open_fake("peak=1")
    sizes = [(3, 1), (10, 2), (4, 3)]  # MiB to take, and for how many rounds it is kept

    def work():
        kept = []
        with device.inference():
            for size, rounds in sizes:
                kept = [(tensor, left - 1) for tensor, left in kept if left > 1]
                kept.append((torch.zeros(size * MIB, dtype=torch.uint8), rounds))

    assert device.memory.peak_of(work) == 14 * MIB  # 10 and 4; 3 is gone by then
    device.close()
    silent = open_fake()
    assert silent.memory.peak_of(lambda: pytest.fail("nobody can tell")) is None
    silent.close()
