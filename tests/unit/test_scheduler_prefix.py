"""Requests that come while another one computes the prefix that they share."""

import pytest
from scheduler_helpers import Sim, make_request

from cardan.core.types.request import FinishReason

PREFIX = [(7 * place) % 19 for place in range(32)]  # eight blocks of four


def shared(key, rest=None, max_tokens=4, **kwargs):
    """A request whose first 32 tokens are those of all others."""
    rest = [key % 23, 1, 2] if rest is None else rest
    return make_request(key, [*PREFIX, *rest], max_tokens, ignore_eos=True, **kwargs)


def burst(sim, count=6, **kwargs):
    for number in range(count):
        sim.add(shared(number, **kwargs))
    return sim


def num_computed(sim):
    return sum(plan.num_tokens for plan in sim.plans)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("budget", [5, 16, 40, 500])
def test_a_burst_computes_its_prefix_once(depth, budget):
    sim = burst(Sim(num_blocks=200, budget=budget, depth=depth))
    sim.run()
    sim.check_answers()
    sim.check_stats()
    assert num_computed(sim) == 32 + 6 * (3 + 3)
    assert [sim.started[key].num_cached_tokens for key in range(6)] == [0] + [32] * 5


def test_the_others_start_in_the_step_after_the_prefix():
    sim = burst(Sim(num_blocks=200, budget=100))
    assert sim.step().keys.tolist() == [0]
    assert sorted(sim.step().keys.tolist()) == list(range(6))


def test_they_start_when_their_part_of_a_long_prompt_is_there():
    """The first goes on with its own prompt meanwhile."""
    sim = Sim(num_blocks=200, budget=16, max_model_len=200)
    sim.add(shared(0, [20, 21, 22] * 20))
    sim.add(shared(1))
    started = []
    while 1 not in sim.started:
        sim.step()
        started.append(sim.device.next_step)
    assert 0 not in sim.finished
    assert not sim.tokens[0]
    assert len(started) == 3  # 32 tokens in two steps, then the second one enters
    sim.run()
    sim.check_answers()


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("after", range(6))
def test_when_the_first_is_aborted_another_takes_over(after, depth):
    sim = burst(Sim(num_blocks=200, budget=10, depth=depth))
    for _ in range(after):
        sim.step()
    sim.abort(0)
    sim.run()
    sim.check_answers()
    assert sim.finished[0].reason is FinishReason.ABORT
    # The heir computes again at most what was not booked.
    assert num_computed(sim) <= 2 * 32 + 6 * (3 + 3)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("chunk", [0, 1, 2])
def test_when_the_first_turns_out_bad_nobody_reads_what_it_wrote(chunk, depth):
    sim = burst(Sim(num_blocks=200, budget=12, depth=depth))
    calls = []

    def spoils(key):
        if key == 0:
            calls.append(key)
        return key == 0 and len(calls) == chunk + 1

    while sim.scheduler.has_work or sim.in_flight:
        sim.step(spoils=spoils)
    sim.check_idle()
    sim.check_answers(may_fail=True)
    assert [key for key, finish in sim.finished.items() if finish.kind == "failed"] == [0]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("after", range(1, 5))
def test_when_the_first_is_preempted_the_others_do_not_wait_for_it(after, depth):
    sim = Sim(num_blocks=200, budget=10, depth=depth, policy="priority", max_num_seqs=2)
    sim.add(shared(0, priority=5))
    for _ in range(after):
        sim.step()
    for key in (1, 2):
        sim.add(shared(key, priority=5))
    for key in (10, 20):
        sim.add(make_request(key, [key, 1, 2], 12, ignore_eos=True, priority=0))
    sim.run()
    sim.check_answers()
    assert sim.totals["num_preemptions"]


def test_an_urgent_request_does_not_wait_for_one_that_comes_after_it():
    sim = Sim(num_blocks=200, budget=10, policy="priority")
    sim.add(shared(0, priority=5))
    sim.step()
    sim.add(shared(1, priority=0))
    assert 1 in sim.step().keys
    sim.run()
    sim.check_answers()


@pytest.mark.parametrize(
    ("caching", "kwargs"),
    [
        (False, {}),
        (True, {"cache_salt": "a"}),
        (True, {"adapter": "a"}),
        (True, {"prompt_logprobs": 1}),
    ],
)
def test_who_can_share_nothing_waits_for_nobody(caching, kwargs):
    sim = Sim(num_blocks=200, budget=500, prefix_caching=caching)
    sim.add(shared(0))
    sim.add(shared(1, **kwargs))
    assert sim.step().keys.tolist() == [0, 1]
    sim.run()
    sim.check_answers()


def test_others_wait_for_one_that_scores_its_prompt():
    """It finds nothing in the cache itself, but what it computes is worth as much."""
    sim = Sim(num_blocks=200, budget=500)
    sim.add(shared(0, prompt_logprobs=1))
    sim.add(shared(1))
    sim.run()
    sim.check_answers()
    assert sim.started[1].num_cached_tokens == 32


def test_less_than_a_block_is_not_waited_for():
    sim = Sim(num_blocks=200, budget=500)
    sim.add(make_request(0, [1, 2, 3, 4, 5], 2))
    sim.add(make_request(1, [1, 2, 3, 5, 4], 2))
    assert sim.step().keys.tolist() == [0, 1]
    sim.run()
    sim.check_answers()


def test_the_last_token_of_a_prompt_is_computed_and_not_waited_for():
    """Two equal prompts of one block: the second could share nothing."""
    sim = Sim(num_blocks=200, budget=500)
    for key in (0, 1):
        sim.add(make_request(key, [1, 2, 3, 4], 2))
    assert sim.step().keys.tolist() == [0, 1]
    sim.run()
    sim.check_answers()


def test_those_behind_go_on_and_leave_a_row_and_blocks():
    sim = Sim(num_blocks=21, max_num_seqs=3, budget=500)
    sim.add(shared(0, max_tokens=1))
    sim.add(shared(1, max_tokens=1))
    sim.add(make_request(2, [20, 21, 22], 1, ignore_eos=True))
    sim.add(make_request(3, [21, 21, 22], 1, ignore_eos=True))
    # The row of 1 stays free, and 3 waits for one.
    assert sim.step().keys.tolist() == [0, 2]
    sim.run()
    sim.check_answers()
    assert sim.totals["num_preemptions"] == 0

    sim = Sim(num_blocks=19, max_num_seqs=4, budget=500)
    sim.add(shared(0, max_tokens=1))
    sim.add(shared(1, max_tokens=1))
    sim.add(make_request(2, [20, 21, 22], 1, ignore_eos=True))
    # 18 blocks, of which 9 are taken and 9 kept: none is left for the third.
    assert sim.step().keys.tolist() == [0]
    sim.run()
    sim.check_answers()
    assert sim.totals["num_preemptions"] == 0


@pytest.mark.parametrize("depth", [0, 1])
def test_a_reset_of_the_cache_ends_the_waiting_for_what_is_gone(depth):
    sim = burst(Sim(num_blocks=200, budget=12, depth=depth))
    for _ in range(2):
        sim.step()
    sim.cache.reset_prefix_cache()
    sim.run()
    sim.check_answers()


def test_samples_of_several_requests_share_one_prompt():
    sim = Sim(num_blocks=200, budget=500, max_num_seqs=8)
    for key in (0, 10, 20):
        sim.add(shared(key, [1, 2, 3], n=2))
    sim.run()
    sim.check_answers()
    # 35 tokens once, three for each other request, one for each second sample, three answers.
    assert num_computed(sim) == 35 + 2 * 3 + 3 + 6 * 3


def test_a_queue_of_waiting_requests_is_looked_through_only_as_far_as_rows_are_free():
    sim = burst(Sim(num_blocks=200, budget=12, max_num_seqs=3), count=30)
    for _ in range(2):
        sim.step()
    looked_at = [s for s in sim.scheduler._waiting if s.blocks.hashes]
    assert len(looked_at) == 2
    sim.run()
    sim.check_answers()
