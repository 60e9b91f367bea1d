"""Plans made before earlier results are booked, and results that come too late."""

import numpy as np
import pytest
from scheduler_device import EOS, VOCAB, reference
from scheduler_helpers import Sim, make_request

from cardan.core.types.request import FinishReason

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]


def endless(key, prompt=PROMPT, max_tokens=20, **kwargs):
    return make_request(key, prompt, max_tokens, ignore_eos=True, **kwargs)


def seed_that_stops(prompt, place):
    """A seed with which the answer's token ``place`` is the first EOS."""
    for seed in range(10_000):
        answer, reason, _stop = reference(make_request(0, prompt, 50, seed=seed))
        if reason is FinishReason.STOP and len(answer) == place + 1:
            return seed
    raise AssertionError


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_a_decode_row_is_planned_every_step_at_any_depth(depth):
    sim = Sim(depth=depth)
    sim.add(endless(0, max_tokens=12))
    sim.run()
    sim.check_answers()
    # One step for the prompt, one for each further token: none is skipped or planned twice.
    assert [plan.num_tokens for plan in sim.plans if len(plan.rows)] == [len(PROMPT)] + [1] * 11


def test_steps_planned_past_a_stop_are_dropped():
    sim = Sim(depth=2)
    sim.add(make_request(0, PROMPT, 30, seed=seed_that_stops(PROMPT, 3)))
    sim.run()
    sim.check_answers()
    assert len(sim.tokens[0]) == 4
    assert sum(len(plan.rows) for plan in sim.plans) == 4 + 2


def test_the_last_token_is_never_computed_and_no_step_runs_past_the_limit():
    sim = Sim(depth=2)
    sim.add(endless(0, max_tokens=3))
    sim.run()
    assert sum(plan.num_tokens for plan in sim.plans) == len(PROMPT) + 2


def test_a_prompt_that_is_only_scored_waits_for_its_last_chunk():
    sim = Sim(depth=2, budget=3)
    sim.add(make_request(0, PROMPT, 0, prompt_logprobs=1))
    sim.run()
    sim.check_answers()
    assert sim.finished[0].reason is FinishReason.LENGTH
    assert not sim.tokens[0]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_row_that_left_and_came_back_ignores_results_of_its_first_stay(depth):
    sim = Sim(depth=depth, policy="priority", max_num_seqs=1)
    sim.add(endless(0, priority=1))
    for _ in range(depth + 2):
        sim.step()
    # The urgent request takes the row and is gone before the steps in flight are booked.
    sim.add(endless(20, [5, 5], priority=0))
    sim.step()
    sim.abort(20)
    sim.run()
    sim.check_answers()
    sim.check_stats()
    assert sim.totals["num_preemptions"] == 1


def test_a_key_used_again_ignores_results_of_its_last_life():
    sim = Sim(depth=1, max_num_seqs=1)
    sim.add(endless(0))
    for _ in range(3):
        sim.step()
    sim.abort(0)
    sim.collect()
    assert sim.finished.pop(0).reason is FinishReason.ABORT
    for told in (sim.started, sim.aborted):
        told.pop(0) if isinstance(told, dict) else told.clear()
    sim.add(endless(0, [7, 7, 7, 7, 7]))
    sim.run()
    sim.check_answers()


def test_rows_change_hands_while_steps_are_in_flight():
    sim = Sim(depth=2, max_num_seqs=1, budget=8)
    for number in range(6):
        sim.add(make_request(number, [number] * 3, 6, seed=number))
    sim.run()
    sim.check_answers()


def test_an_abort_frees_the_row_at_once_and_tells_the_device_with_the_next_plan():
    sim = Sim(depth=1)
    sim.add(endless(0))
    sim.step()
    sim.step()
    sim.abort(0)
    assert sim.scheduler.num_live == 0
    assert sim.cache.num_used == 0
    plan = sim.step()
    assert plan.freed_rows == [0]
    assert not len(plan.rows)
    sim.run()
    sim.check_answers()


def test_blocks_that_a_step_in_flight_writes_cannot_be_found():
    # Steps of two tokens, blocks of four: the step in flight fills the block, then turns out bad.
    sim = Sim(depth=1, budget=100, block_size=4)
    seed = seed_that_stops(PROMPT[:7], 0)
    # The answer's first token stops; its KV is computed by the step in flight, which fails.
    sim.add(make_request(0, PROMPT[:7], 20, seed=seed))
    calls = []

    def second_fails(key):
        calls.append(key)
        return len(calls) == 2

    while 0 not in sim.finished:
        sim.step(second_fails)
    assert len(calls) == 2
    assert sim.finished[0].reason is FinishReason.STOP
    sim.add(endless(10, [*PROMPT[:7], EOS, 1, 2], seed=1))
    sim.run()
    sim.check_answers()
    assert sim.started[10].num_cached_tokens == 4


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_failure_ends_the_row_and_its_blocks_are_not_found(depth):
    sim = Sim(depth=depth, budget=6)
    sim.add(endless(0))
    sim.add(endless(10, [3, 2, 1]))
    while 0 not in sim.finished:
        sim.step(lambda key: key == 0)
    assert sim.finished[0].reason is FinishReason.ERROR
    assert sim.finished[0].kind == "failed"
    assert not sim.tokens[0]
    sim.add(endless(20))
    sim.run()
    sim.check_answers(may_fail=True)
    assert sim.started[20].num_cached_tokens == 0


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_samples_do_not_pass_on_a_failed_prompt(depth):
    sim = Sim(depth=depth)
    sim.add(endless(0, n=3))
    first = []

    def first_fails(key):
        first.append(key)
        return len(first) == 1

    while 0 not in sim.finished:
        sim.step(first_fails)
    sim.add(endless(20, [*PROMPT, 1]))
    sim.run()
    sim.check_answers(may_fail=True)
    assert [sim.finished[key].reason for key in (0, 20)] == ["error", "length"]


def test_several_tokens_a_step_stop_where_they_should():
    """A result may hold more tokens than the row needs: those past the end are dropped."""
    sim = Sim()
    sim.add(endless(0, max_tokens=3))
    sim.add(make_request(10, PROMPT[1:], 9, stop_token_ids=(VOCAB,), ignore_eos=True))
    plan = sim.scheduler.schedule()
    result = sim.device.execute(plan)
    result.token_ids = np.array([[1, 2, 3, 4], [1, VOCAB, 3, 4]], np.int32)
    result.num_sampled = np.array([4, 4], np.int32)
    sim.scheduler.update(plan, result)
    sim.collect()
    assert sim.tokens == {0: [1, 2, 3], 10: [1, VOCAB]}
    assert sim.finished[0].reason is FinishReason.LENGTH
    assert sim.finished[10].reason is FinishReason.STOP
    assert sim.finished[10].stop_token_id == VOCAB
    assert sim.cache.num_used == 0


def test_a_corrupt_chunk_fails_its_request_before_anybody_shares_it():
    """A chunk that is not the last of its prompt yields no token that could tell."""
    sim = Sim(budget=4)
    sim.add(endless(0))
    plan = sim.scheduler.schedule()
    assert plan.num_tokens == 4
    assert not plan.samples.any()
    result = sim.device.execute(plan)
    result.corrupt = np.array([True])
    sim.scheduler.update(plan, result)
    sim.collect()
    assert sim.finished[0].kind == "failed"
    assert sim.cache.num_cached == 0
    other = endless(20)
    sim.add(other)
    sim.run()
    assert sim.tokens[20] == reference(other)[0]
    assert sim.started[20].num_cached_tokens == 0


def test_a_corrupt_row_that_samples_gives_no_token_and_harms_no_other_row():
    sim = Sim()
    other = endless(10, [3, 2, 1])
    sim.add(endless(0))
    sim.add(other)
    plan = sim.scheduler.schedule()
    result = sim.device.execute(plan)
    result.corrupt = plan.keys == 0
    sim.scheduler.update(plan, result)
    sim.collect()
    assert sim.finished[0].kind == "failed"
    assert not sim.tokens[0]
    sim.run()
    assert sim.tokens[10] == reference(other)[0]


def test_rows_that_cannot_grow_keep_no_blocks_from_others():
    """Eight requests of one block each run together in a pool of eight."""
    sim = Sim(num_blocks=9)
    for number in range(8):
        sim.add(endless(10 * number, [number + 4], 3))
    sim.step()
    assert sim.scheduler.take_outputs().stats.num_running == 8
