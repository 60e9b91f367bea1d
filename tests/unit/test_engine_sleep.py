"""Engines that give their memory back and take it again: answers before and after are the same."""

import threading

import pytest
import torch

from cardan.bootstrap.engine_builder import build_engine
from cardan.core.engine.client import InProcessClient
from cardan.core.engine.messages import Answered, Sleep, Wake
from cardan.core.engine.sleeper import Sleeper
from cardan.core.engine.tickets import Tickets
from cardan.core.interfaces.errors import OutOfMemoryError, UnsupportedError
from cardan.core.sampling.penalties import Penalties
from cardan.core.types.errors import (
    EngineAsleepError,
    EngineDeadError,
    InputError,
    RequestFailedError,
)
from cardan.core.types.request import EngineRequest
from cardan.core.types.sampling_params import SamplingParams
from cardan.llm import LLM, config_from_settings
from cardan.testing.fake.memory import FakeMemory
from cardan.testing.fake.settings import VARIABLE
from cardan.testing.tiny_models import make_tiny_model, prompt_ids

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": prompt_ids(length, length)} for length in (5, 33)]
SETTINGS = {"dtype": "float32", "max_num_seqs": 4, "num_blocks": 32, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny_model("llama", folder)
    return str(folder)


def open_llm(folder, monkeypatch, platform):
    monkeypatch.setenv(VARIABLE, "graphs=decode")
    threads = {"num_threads": 1} if platform == "cpu" else {}
    return LLM(folder, platform=platform, **SETTINGS, **threads)


def tokens(llm):
    found = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids for output in found]


def num_cached(llm):
    return llm.generate(PROMPTS[1:], GREEDY, use_tqdm=False)[0].num_cached_tokens


def executor_of(llm):
    return llm._client._loop._engine._executor


@pytest.mark.parametrize(("platform", "level"), [("fake", 1), ("fake", 2), ("cpu", 2)])
def test_the_same_answers_after_a_sleep(folder, monkeypatch, platform, level):
    with open_llm(folder, monkeypatch, platform) as llm:
        before = tokens(llm)
        executor = executor_of(llm)
        memory = executor._parts.device.memory
        held = memory.stats().by_tag
        num_graphs = executor._runner.graphs.num_graphs
        for _ in range(2 if level == 1 else 1):
            llm.sleep(level)
            llm.sleep(level)  # harmless
            assert llm.is_sleeping
            assert memory.stats().by_tag["kv"] == 0
            if platform == "fake":
                assert memory.info().free == memory.info().total
            with pytest.raises(EngineAsleepError, match=f"level {level}.*/wake_up"):
                tokens(llm)
            with pytest.raises(InputError, match=f"sleeps at level {level}"):
                llm.sleep(3 - level)
            llm.wake_up()
            llm.wake_up()
            assert not llm.is_sleeping
            assert tokens(llm) == before
        if platform == "fake":
            assert memory.stats().by_tag == held
            assert executor._runner.graphs.num_graphs == num_graphs > 0
        assert num_cached(llm) > 0
        llm.sleep(level)
        llm.wake_up()
        assert num_cached(llm) == 0


def test_parts_wake_one_after_the_other(folder, monkeypatch):
    with open_llm(folder, monkeypatch, "fake") as llm:
        before = tokens(llm)
        memory = executor_of(llm)._parts.device.memory
        weights = memory.stats().by_tag["weights"]
        llm.sleep(2)
        llm.wake_up(tags=["weights"])
        assert memory.stats().by_tag["weights"] == weights
        assert memory.stats().by_tag["kv"] == 0
        assert llm.is_sleeping
        with pytest.raises(EngineAsleepError):
            tokens(llm)
        llm.wake_up(tags=["kv_cache"])
        assert tokens(llm) == before


def test_what_cannot_be_asked_for(folder, monkeypatch):
    with open_llm(folder, monkeypatch, "cpu") as llm:
        with pytest.raises(InputError, match="level is 3; it must be one of 1, 2"):
            llm.sleep(3)
        with pytest.raises(InputError, match="level is '1'"):
            llm.sleep("1")
        with pytest.raises(InputError, match="mode is 'keep'; it must be wait"):
            llm.sleep(mode="keep")
        with pytest.raises(InputError, match=r"tags is .*name any of weights, kv_cache"):
            llm.wake_up(tags=["scheduling"])
        with pytest.raises(InputError, match="tags is 'weights'"):
            llm.wake_up(tags="weights")
        assert not llm.is_sleeping
        assert len(tokens(llm)) == 2


def test_a_host_that_cannot_keep_the_weights(folder, monkeypatch):
    with open_llm(folder, monkeypatch, "fake") as llm:
        before = tokens(llm)

        def refuse(memory, level, tags):
            raise OutOfMemoryError("a host pool does not fit")

        with monkeypatch.context() as patch:
            patch.setattr(FakeMemory, "sleep", refuse)
            with pytest.raises(RequestFailedError, match="a host pool does not fit"):
                llm.sleep()
        assert not llm.is_sleeping
        assert tokens(llm) == before


def test_a_device_that_was_filled_meanwhile(folder, monkeypatch):
    with open_llm(folder, monkeypatch, "fake") as llm:
        before = tokens(llm)
        llm.sleep(2)

        def refuse(memory, tags=None):
            raise OutOfMemoryError("wake it again")

        with monkeypatch.context() as patch:
            patch.setattr(FakeMemory, "wake", refuse)
            with pytest.raises(RequestFailedError, match="wake it again"):
                llm.wake_up()
        assert llm.is_sleeping
        llm.wake_up()
        assert tokens(llm) == before


@pytest.mark.parametrize("what", ["_make_runner", "warmup"])
def test_a_runner_that_does_not_fit_when_it_wakes(folder, monkeypatch, what):
    with open_llm(folder, monkeypatch, "fake") as llm:
        before = tokens(llm)
        executor = executor_of(llm)
        num_graphs = executor._runner.graphs.num_graphs
        llm.sleep(1)

        def refuse(*_of):
            raise torch.OutOfMemoryError("out of memory. Tried to allocate 2 GiB.\nmore")

        with monkeypatch.context() as patch:
            patch.setattr(executor, what, refuse)
            with pytest.raises(RequestFailedError, match=r"2 GiB.*wake the engine again"):
                llm.wake_up()
        assert llm.is_sleeping
        llm.wake_up()
        assert executor._runner.graphs.num_graphs == num_graphs
        assert tokens(llm) == before


@pytest.mark.parametrize("level", [1, 2])
def test_a_device_that_refuses_to_sleep(folder, monkeypatch, level):
    with open_llm(folder, monkeypatch, "fake") as llm:
        before = tokens(llm)

        def refuse(memory, level, tags):
            raise UnsupportedError("not these weights")

        with monkeypatch.context() as patch:
            patch.setattr(FakeMemory, "sleep", refuse)
            with pytest.raises(UnsupportedError, match="not these weights"):
                llm.sleep(level)
        assert not llm.is_sleeping
        assert tokens(llm) == before


def test_weights_that_are_gone_when_they_are_wanted_again(folder, monkeypatch):
    with open_llm(folder, monkeypatch, "cpu") as llm:
        before = tokens(llm)
        llm.sleep(2)
        executor = executor_of(llm)
        source = executor._source

        def refuse(shapes):
            raise OutOfMemoryError("no weights now")

        executor._source = refuse
        with pytest.raises(RequestFailedError, match="no weights now"):
            llm.wake_up()
        assert llm.is_sleeping
        executor._source = source
        llm.wake_up()
        assert tokens(llm) == before


def test_a_platform_that_cannot_sleep(folder, monkeypatch):
    monkeypatch.setenv(VARIABLE, "tier=executor")
    with LLM(folder, platform="fake", **SETTINGS) as llm:
        with pytest.raises(UnsupportedError, match="cannot sleep"):
            llm.sleep()
        assert len(tokens(llm)) == 2


# -- running requests -----------------------------------------------------------------------------


class Sink:
    def __init__(self):
        self.tokens, self.finished, self.news = {}, {}, threading.Condition()

    def on_outputs(self, outputs):
        with self.news:
            for key, token_id in zip(outputs.keys, outputs.token_ids, strict=True):
                self.tokens.setdefault(key, []).append(token_id)
            self.finished.update(outputs.finished)
            self.news.notify_all()

    def on_death(self, reason):
        pass

    def wait(self, condition):
        with self.news:
            assert self.news.wait_for(condition, 30)


def request(key, max_tokens):
    return EngineRequest(
        key=key,
        request_id=str(key),
        prompt_token_ids=[1, 2, 3],
        params=SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
        max_tokens=max_tokens,
        arrival_time=0.0,
    )


@pytest.fixture
def client(folder, monkeypatch):
    monkeypatch.setenv(VARIABLE, "step_ms=2")
    config = config_from_settings(folder, {**SETTINGS, "platform": "fake"})
    client = InProcessClient(lambda: build_engine(config))
    client.connect(Sink())
    yield client
    client.close()


def test_running_requests_are_waited_for(client):
    sink = client._sink
    client.submit(request(1, 16))
    sink.wait(lambda: 1 in sink.tokens)
    future = client.sleep(1, "wait")
    client.submit(request(2, 1))
    sink.wait(lambda: 2 in sink.finished)
    assert sink.finished[2].kind == "asleep"
    assert "about to sleep" in sink.finished[2].message
    again = client.sleep(1, "wait")
    with pytest.raises(InputError, match="sleeps at level 1, or is about to"):
        client.sleep(2, "wait").result(30)
    future.result(30)
    again.result(30)
    assert len(sink.tokens[1]) == 16
    assert client.sleep_level == 1


def test_running_requests_are_aborted_on_demand(client):
    sink = client._sink
    client.submit(request(1, 100))
    sink.wait(lambda: 1 in sink.tokens)
    client.sleep(2, "abort").result(30)
    assert sink.finished[1].reason == "abort"
    assert len(sink.tokens[1]) < 100
    client.wake_up(None).result(30)
    client.submit(request(3, 2))
    sink.wait(lambda: 3 in sink.finished)
    assert len(sink.tokens[3]) == 2


def test_a_sleep_that_has_not_begun_is_given_up(client):
    sink = client._sink
    client.submit(request(1, 20))
    sink.wait(lambda: 1 in sink.tokens)
    future = client.sleep(1, "wait")
    client.wake_up(None).result(30)
    with pytest.raises(UnsupportedError, match="woken up before it slept"):
        future.result(30)
    client.submit(request(2, 2))
    sink.wait(lambda: {1, 2} <= sink.finished.keys())
    assert len(sink.tokens[1]) == 20


def test_an_engine_that_ends_meanwhile(client):
    sink = client._sink
    client.submit(request(1, 60))
    sink.wait(lambda: 1 in sink.tokens)
    future = client.sleep(1, "wait")
    client.close()
    with pytest.raises(EngineDeadError, match="shut down"):
        future.result(30)
    with pytest.raises(EngineDeadError, match="shut down"):
        client.sleep(1, "wait")


def test_waiting_for_the_move_is_no_hang():
    class Engine:
        has_work = False

        def sleep_levels(self):
            return (1,)

        def sleep(self, level):
            seen.append(sleeper.is_moving)

        def wake(self, tags):
            seen.append(sleeper.is_moving)
            raise RuntimeError("the device is lost")

    seen, answers = [], []
    sleeper = Sleeper(Engine(), lambda: None, answers.append)
    began = sleeper.moved_at
    sleeper.take(Sleep(7, 1, "wait"))
    sleeper.advance()
    assert answers == [Answered(7, 1)]
    with pytest.raises(RuntimeError, match="lost"):
        sleeper.take(Wake(8, ["weights"]))
    assert (seen, sleeper.is_moving) == ([True, True], False)
    assert sleeper.moved_at > began


def test_commands_are_obeyed_in_their_order():
    class Engine:
        has_work = False

        def sleep_levels(self):
            return (1, 2)

        def sleep(self, level):
            done.append(level)

        def wake(self, tags):
            done.append("awake")
            return ()

    done, answers = [], []
    sleeper = Sleeper(Engine(), lambda: None, answers.append)
    sleeper.take(Sleep(1, 1, "wait"))
    sleeper.advance()
    # All of these come between two steps.
    sleeper.take(Wake(2, ["weights", "kv"]))
    assert sleeper.refusal is None
    sleeper.take(Sleep(3, 2, "wait"))
    sleeper.advance()
    assert done == [1, "awake", 2]
    assert answers == [Answered(1, 1), Answered(2, 0), Answered(3, 2)]


def test_who_no_longer_waits_is_not_told():
    tickets = Tickets()
    command, future = tickets.sleep(1, "wait")
    assert future.cancel()
    tickets.settle(Answered(command.ticket, 1))
    tickets.settle(Answered(99, 1))
    assert tickets.level == 1
    tickets.fail_all("gone")
    assert tickets.level == 0


# -- steps that do not fit into memory ------------------------------------------------------------


@pytest.mark.parametrize("half", ["forward", "sample"])
@pytest.mark.parametrize("depth", ["depth=0", "depth=1"])
def test_a_step_that_does_not_fit_ends_its_sequences_alone(folder, monkeypatch, half, depth):
    monkeypatch.setenv(VARIABLE, depth)
    config = config_from_settings(folder, {**SETTINGS, "platform": "fake"})
    parts = build_engine(config)
    engine, executor = parts.engine, parts.engine._executor
    try:
        runner = executor._runner
        where, name = (runner._batch, "gather") if half == "forward" else (runner, "_sampled")
        usual, left = getattr(where, name), [1]

        def refuse(plan, *more):
            if plan.num_tokens > 8 and left:
                left.clear()
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")
            return usual(plan, *more)

        monkeypatch.setattr(where, name, refuse)
        tokens, finished = {}, {}
        engine.add(request(1, 5))
        for turn in range(24):
            if turn == 2:
                big = request(2, 5)
                big.prompt_token_ids[:] = list(range(1, 30))
                engine.add(big)
            if turn == 10:
                again = request(3, 5)
                again.prompt_token_ids[:] = list(range(1, 30))
                engine.add(again)
                engine.add(request(4, 5))
            outputs = engine.step()
            for key, token_id in zip(outputs.keys, outputs.token_ids, strict=True):
                tokens.setdefault(key, []).append(token_id)
            finished.update(outputs.finished)
        assert finished[2].kind == "failed"
        assert "a step of 30 tokens and 2 sequences does not fit" in finished[2].message
        assert "Tried to allocate 2 GiB" in finished[2].message
        assert "more)" not in finished[2].message
        assert "--memory-utilization" in finished[2].message
        assert 2 not in tokens
        # The one that shared the step is gone with it, the others never knew.
        assert finished[1].kind == "failed"
        assert [finished[key].reason for key in (3, 4)] == ["length"] * 2
        assert [len(tokens[key]) for key in (3, 4)] == [5, 5]
        assert tokens[4][: len(tokens[1])] == tokens[1]
        assert not engine.has_work
        assert executor.num_live_rows == 0
        assert engine._scheduler._cache.num_used == 0
    finally:
        parts.close("done")


def test_rows_whose_histories_find_no_memory_end_together(folder, monkeypatch):
    monkeypatch.setenv(VARIABLE, "depth=1")
    config = config_from_settings(folder, {**SETTINGS, "platform": "fake"})
    parts = build_engine(config)
    engine, executor = parts.engine, parts.engine._executor
    try:
        usual, left = Penalties.add, [1]

        def refuse(self, *row):
            if left:
                left.clear()
                raise MemoryError("no room for counts")
            usual(self, *row)

        monkeypatch.setattr(Penalties, "add", refuse)
        for key in (1, 2):
            engine.add(request(key, 5))
        finished, tokens = {}, []
        for turn in range(16):
            if turn == 3:
                engine.add(request(3, 5))
            outputs = engine.step()
            finished.update(outputs.finished)
            tokens += outputs.token_ids
        assert [finished[key].kind for key in (1, 2)] == ["failed"] * 2
        assert "no room for counts" in finished[1].message
        assert finished[3].reason == "length"
        assert len(tokens) == 5
        assert executor.num_live_rows == 0
        assert engine._scheduler._cache.num_used == 0
    finally:
        parts.close("done")


def test_other_errors_of_a_step_are_the_engines_end(folder, monkeypatch):
    monkeypatch.setenv(VARIABLE, "depth=0")
    config = config_from_settings(folder, {**SETTINGS, "platform": "fake"})
    parts = build_engine(config)
    try:
        parts.engine.add(request(1, 5))
        with monkeypatch.context() as patch:

            def fail(plan):
                raise RuntimeError("an illegal address")

            patch.setattr(parts.engine._executor._runner, "forward", fail)
            with pytest.raises(RuntimeError, match="illegal"):
                parts.engine.step()
    finally:
        parts.close("done")
