"""Which requests get in, in which order, and with which words others are refused."""

import pytest
from scheduler_helpers import Sim, make_request

from cardan.core.interfaces.scheduling import SchedulingPolicy
from cardan.core.types.errors import ConfigError, InputError, QueueFullError

PROMPT = list(range(1, 11))


def endless(key, num_prompt=4, max_tokens=8, **kwargs):
    # Prompts differ from their first token on, so that nothing is shared.
    prompt = [key % 20, *PROMPT, *PROMPT, *PROMPT, *PROMPT, *PROMPT][:num_prompt]
    return make_request(key, prompt, max_tokens, ignore_eos=True, **kwargs)


# -- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "field", "words"),
    [
        (make_request(0, [], 3), "prompt", "no tokens"),
        (make_request(0, [1] * 30, 3), "max_tokens", "context of 32"),
        (make_request(0, [1] * 40, 3), "prompt", "40 prompt tokens"),
        (make_request(0, [1], 40), "max_tokens", "40 tokens to generate"),
    ],
)
def test_what_never_fits_is_refused_with_the_field(request_, field, words):
    sim = Sim(max_model_len=32)
    with pytest.raises(InputError, match=words) as caught:
        sim.scheduler.add(request_)
    assert caught.value.field == field
    sim.check_idle()


def test_what_never_fits_the_cache_is_refused():
    sim = Sim(num_blocks=4, block_size=4, max_model_len=100)
    sim.add(endless(0, 5, 7))
    with pytest.raises(InputError, match="13 tokens need 4 KV blocks, the cache has 3") as caught:
        sim.scheduler.add(endless(10, 5, 8))
    assert caught.value.field == "max_tokens"
    with pytest.raises(InputError, match="need 4 KV blocks") as caught:
        sim.scheduler.add(endless(10, 13, 1))
    assert caught.value.field == "prompt"
    sim.run()


def test_the_longest_request_fits():
    sim = Sim(num_blocks=9, block_size=4, max_model_len=32)
    sim.add(endless(0, 20, 12))
    sim.run()
    sim.check_answers()
    assert sim.totals["num_preemptions"] == 0


def test_more_samples_than_the_queue_can_ever_hold_are_invalid():
    sim = Sim(max_num_queued_reqs=2)
    with pytest.raises(InputError, match=r"3 samples.*at most 2") as caught:
        sim.scheduler.add(endless(0, n=3))
    assert caught.value.field == "n"
    sim.check_idle()


def test_more_prompt_tokens_than_the_queue_can_ever_hold_are_invalid():
    sim = Sim(max_num_queued_tokens=20)
    with pytest.raises(InputError, match=r"24 prompt tokens.*at most 20") as caught:
        sim.scheduler.add(endless(0, 12, n=2))
    assert caught.value.field == "prompt"
    sim.check_idle()


def test_a_full_queue_refuses_and_takes_again_when_it_empties():
    sim = Sim(max_num_queued_reqs=2, max_num_seqs=1)
    sim.add(endless(0, n=2))
    with pytest.raises(QueueFullError, match="2 of 2 sequences wait"):
        sim.scheduler.add(endless(10))
    sim.step()
    sim.add(endless(10))
    with pytest.raises(QueueFullError):
        sim.scheduler.add(endless(20))
    sim.run()
    sim.add(endless(20))
    sim.run()
    sim.check_answers()


def test_a_cap_on_waiting_tokens_counts_every_sample():
    sim = Sim(max_num_queued_tokens=20)
    sim.add(endless(0, 6, n=3))
    with pytest.raises(QueueFullError, match="18 of 20 prompt tokens wait"):
        sim.scheduler.add(endless(10, 3))
    sim.add(endless(10, 2))
    sim.run()
    sim.check_answers()


class Choosy(SchedulingPolicy):
    name, contract = "choosy", (1, 0)

    def __init__(self):
        self.seen = []

    def sort_key(self, request):
        return (-request.num_prompt_tokens,)

    def admit(self, request, num_waiting, num_running):
        self.seen.append((request.request_id, num_waiting, num_running))
        return "come back later" if request.num_prompt_tokens == 3 else None


def test_a_policy_orders_and_refuses():
    policy = Choosy()
    sim = Sim(policy=policy, max_num_seqs=1)
    sim.add(endless(0, 4))
    sim.add(endless(10, 6))
    sim.step()
    assert list(sim.started) == [10]
    with pytest.raises(QueueFullError, match="come back later"):
        sim.scheduler.add(endless(20, 3))
    assert policy.seen == [("r0", 0, 0), ("r10", 1, 0), ("r20", 1, 1)]
    sim.run()


def test_vetoes_and_unknown_arguments_are_invalid():
    def veto(view):
        return "no adapters on Sundays" if view.adapter else None

    def check(params):
        return InputError("no such argument", "extra_args") if params.n == 2 else None

    sim = Sim(veto=veto, check_params=check)
    with pytest.raises(InputError, match="Sundays"):
        sim.scheduler.add(endless(0, adapter="a"))
    with pytest.raises(InputError, match="no such argument") as caught:
        sim.scheduler.add(endless(0, n=2))
    assert caught.value.field == "extra_args"
    sim.check_idle()


def test_a_budget_that_cannot_hold_a_whole_prompt_needs_chunks():
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens.*at least 40"):
        Sim(budget=39, max_model_len=40, enable_chunked_prefill=False)
    Sim(budget=40, max_model_len=40, enable_chunked_prefill=False)


def test_a_threshold_without_chunks_is_a_contradiction():
    with pytest.raises(ConfigError, match="long_prefill_token_threshold"):
        Sim(
            budget=40,
            max_model_len=40,
            enable_chunked_prefill=False,
            long_prefill_token_threshold=4,
        )


# -- order -------------------------------------------------------------------------------------


def test_first_come_first_served_whatever_the_priority():
    sim = Sim(max_num_seqs=1)
    for number, priority in enumerate([5, 1, 3]):
        sim.add(endless(10 * number, priority=priority))
    sim.run()
    assert list(sim.finished) == [0, 10, 20]
    assert sim.totals["num_preemptions"] == 0


def test_lower_priority_values_go_first_and_ties_by_arrival():
    sim = Sim(max_num_seqs=1, policy="priority")
    for number, priority in enumerate([5, 1, 3, 1]):
        sim.add(endless(10 * number, priority=priority))
    sim.run()
    assert list(sim.started) == [10, 30, 20, 0]


def test_an_urgent_request_takes_the_row_of_the_least_urgent():
    sim = Sim(max_num_seqs=2, policy="priority")
    sim.add(endless(0, priority=1))
    sim.add(endless(10, priority=2))
    sim.step()
    sim.add(endless(20, priority=0))
    plan = sim.step()
    assert sorted(plan.keys.tolist()) == [0, 20]
    assert sim.totals["num_preemptions"] == 1
    sim.run()
    sim.check_answers()
    sim.check_stats()
    assert list(sim.finished)[-1] == 10


def test_an_urgent_request_takes_blocks_of_less_urgent_ones():
    sim = Sim(num_blocks=11, block_size=4, policy="priority", prefix_caching=False)
    for number in range(3):
        sim.add(endless(10 * number, 10, 8, priority=1))
    sim.step()
    sim.add(endless(30, 30, 2, priority=0))
    sim.step()
    assert 30 in sim.started
    sim.run()
    sim.check_answers()
    assert next(iter(sim.finished)) == 30


def test_equals_do_not_preempt_each_other():
    sim = Sim(max_num_seqs=1, policy="priority")
    sim.add(endless(0, priority=1))
    sim.step()
    sim.add(endless(10, priority=1))
    sim.run()
    assert list(sim.finished) == [0, 10]
    assert sim.totals["num_preemptions"] == 0


def test_when_blocks_lack_the_last_to_come_is_preempted_and_is_next_again():
    sim = Sim(num_blocks=9, block_size=2, max_num_seqs=3, prefix_caching=False)
    for number in range(3):
        sim.add(endless(10 * number, 4, 8))
    sim.run()
    sim.check_answers()
    sim.check_stats()
    assert sim.totals["num_preemptions"]
    assert list(sim.finished) == [0, 10, 20]


def test_a_stream_of_short_requests_does_not_starve_a_long_one():
    sim = Sim(num_blocks=17, block_size=4, max_num_seqs=4, budget=16)
    for number in range(3):
        sim.add(endless(number, 4, 20))
    sim.step()
    sim.add(endless(100, 50, 3))
    for number in range(200, 300):
        sim.add(endless(number, 4, 6))
        sim.step()
        if 100 in sim.finished:
            break
    assert 100 in sim.finished
    assert number < 260
    sim.run()
    sim.check_answers()


@pytest.mark.parametrize("threshold", [0, 3])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_answers_go_on_while_a_long_prompt_is_read(threshold, depth, policy):
    """Even if the prompt is more urgent than the answers."""
    sim = Sim(budget=8, depth=depth, policy=policy, long_prefill_token_threshold=threshold)
    for number in range(3):
        sim.add(endless(10 * number, 2, 30, priority=1))
    sim.step()
    sim.step()
    sim.add(endless(100, 50, 2, priority=0))
    while not sim.tokens[100]:
        plan = sim.step()
        assert {0, 10, 20} <= set(plan.keys.tolist())
    sim.run()
    sim.check_answers()


def test_a_threshold_lets_a_short_late_prompt_pass_a_long_one():
    sim = Sim(budget=16, long_prefill_token_threshold=8)
    sim.add(endless(0, 50, 2))
    sim.step()
    sim.add(endless(10, 4, 2))
    sim.step()
    assert sim.tokens[10]
    assert not sim.tokens[0]
    sim.run()
    sim.check_answers()


def test_no_prompt_is_split_without_chunked_prefill():
    sim = Sim(budget=40, max_model_len=40, enable_chunked_prefill=False)
    for number, length in enumerate([30, 20, 5, 35]):
        sim.add(endless(10 * number, length, 4))
    sim.run()
    sim.check_answers()
    for plan in sim.plans:
        counts = dict(zip(plan.rows.tolist(), plan.num_scheduled_tokens.tolist(), strict=True))
        for new in plan.new_rows:
            assert counts[new.row] == len(new.token_ids) - new.num_computed_tokens
        entering = {new.row for new in plan.new_rows}
        assert all(count == 1 for row, count in counts.items() if row not in entering)


# -- the prefix cache --------------------------------------------------------------------------


def test_a_second_request_computes_only_what_is_new():
    sim = Sim()
    sim.add(make_request(0, PROMPT, 1))
    sim.run()
    sim.add(make_request(10, [*PROMPT[:9], 0], 1))
    sim.run()
    sim.check_answers()
    sim.check_stats()
    assert sim.started[10].num_cached_tokens == 8
    assert [plan.num_tokens for plan in sim.plans if len(plan.rows)] == [10, 2]


@pytest.mark.parametrize(
    "kwargs", [{"cache_salt": "a"}, {"cache_salt": ""}, {"adapter": "a"}, {"adapter": ""}]
)
def test_domains_share_nothing(kwargs):
    sim = Sim()
    sim.add(make_request(0, PROMPT, 1))
    sim.run()
    sim.add(make_request(10, PROMPT, 1, **kwargs))
    sim.run()
    sim.check_answers()
    assert sim.started[10].num_cached_tokens == 0


def test_a_salt_may_hold_any_text():
    sim = Sim()
    sim.add(make_request(0, PROMPT, 1, cache_salt="\ud800"))
    sim.add(make_request(10, PROMPT, 1, adapter="\udfff\x00"))
    sim.run()
    sim.check_idle()


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_prompt_is_scored_in_full_whatever_is_cached(chunk, depth):
    sim = Sim(budget=chunk, depth=depth)
    sim.add(make_request(0, PROMPT, 1))
    sim.run()
    for key, max_tokens in ((10, 0), (20, 3)):
        sim.add(make_request(key, PROMPT, max_tokens, prompt_logprobs=1, ignore_eos=True))
        sim.run()
        assert sim.started[key].num_cached_tokens == 0
    sim.check_answers()


@pytest.mark.parametrize("steps", range(1, 9))
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_preempted_request_reports_each_prompt_position_once(steps, depth):
    sim = Sim(policy="priority", max_num_seqs=1, budget=3, depth=depth)
    sim.add(make_request(0, PROMPT, 6, priority=1, prompt_logprobs=1, logprobs=1, ignore_eos=True))
    for _ in range(steps):
        sim.step()
    sim.add(make_request(10, PROMPT, 2, priority=0))
    sim.run()
    assert sim.totals["num_preemptions"] == 1
    sim.check_answers()


def test_outputs_wait_to_be_taken_when_a_request_ends_at_once():
    sim = Sim()
    sim.add(make_request(0, [1], 0, prompt_logprobs=1))
    assert sim.scheduler.num_live == 0
    assert sim.scheduler.has_work
    sim.run()
    sim.check_answers()


def test_everything_ends_when_the_engine_gives_up():
    sim = Sim(max_num_seqs=2)
    for number in range(4):
        sim.add(endless(10 * number, n=2))
    sim.step()
    sim.step()
    sim.scheduler.fail_all("the device is gone")
    sim.collect()
    assert {finish.message for finish in sim.finished.values()} == {"the device is gone"}
    assert len(sim.finished) == 8
    assert sim.cache.num_used == 0
    sim.run()


def test_the_tokens_of_a_preempted_row_return_to_the_budget():
    sim = Sim(policy="priority", max_num_seqs=1, budget=8, long_prefill_token_threshold=6)
    sim.add(endless(0, 40, 2, priority=1))
    sim.step()
    sim.add(endless(11, 20, 2, priority=0))
    plan = sim.step()
    assert (plan.keys.tolist(), plan.num_tokens) == ([11], 6)
    sim.run()
    sim.check_answers()


def test_a_step_that_lacks_blocks_admits_nobody():
    sim = Sim(num_blocks=9, block_size=2, max_num_seqs=3, prefix_caching=False)
    for number in range(6):
        sim.add(endless(number, 4, 8))
    before = 0
    while sim.scheduler.num_live:
        plan = sim.step()
        if sim.totals["num_preemptions"] > before:
            assert not plan.new_rows
        before = sim.totals["num_preemptions"]
    assert before
    sim.run()
    sim.check_answers()
