"""How a step's tokens are shared between answers, prompts and new sequences."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_helpers import Sim, make_request

from cardan.core.scheduler.shares import share_tokens


def naive(needs, budget, mixed):
    """Count by place, one token at a time."""
    given = [0] * len(needs)
    for place, need in enumerate(needs):
        if need == 1 and budget:
            given[place], budget = 1, budget - 1
    rest = min(budget, mixed) if mixed and any(given) else budget
    long = [place for place, need in enumerate(needs) if need > 1 and need > rest]
    if long:
        given[long[0]] = -(-rest // 2)
        rest -= given[long[0]]
    for place, need in enumerate(needs):
        while need > 1 and place not in long and given[place] < need and rest:
            given[place] += 1
            rest -= 1
    return given, rest, long


@settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(
    st.lists(st.sampled_from([0, 1, 1, 1, 2, 3, 5, 9, 40]), max_size=9),
    st.integers(1, 40),
    st.sampled_from([None, 1, 2, 6, 100]),
)
def test_shares_are_those_of_a_count_by_hand(needs, budget, mixed):
    rows = np.arange(len(needs))[::-1].copy()
    shares = share_tokens(rows, np.array(needs, np.int32), budget, mixed)
    expected, rest, long = naive(needs, budget, mixed)
    by_row = dict(zip(shares.rows.tolist(), shares.counts.tolist(), strict=True))
    assert [by_row[row] for row in rows.tolist()] == expected
    assert shares.rest == rest
    assert shares.rows[shares.long_places].tolist() == [int(rows[place]) for place in long]
    assert sum(expected) + rest <= budget
    assert shares.counts.dtype == np.int32
    # Decoding rows stand first.
    assert sorted(shares.needs.tolist(), key=lambda need: need > 1) == shares.needs.tolist()


def prompt_of(key, length):
    """No two share their beginning."""
    return [key % 23, key // 23, *([1, 2, 3] * length)][:length]


def add(sim, key, length, max_tokens=30):
    sim.add(make_request(key, prompt_of(key, length), max_tokens, ignore_eos=True))


def prompt_tokens(plan):
    """Tokens of the step that are not one further token of an answer."""
    answers = plan.samples & (plan.num_scheduled_tokens == 1)
    return int(plan.num_scheduled_tokens[~answers].sum())


@pytest.mark.parametrize("depth", [0, 1])
def test_prompts_beside_answers_stay_within_their_budget(depth):
    sim = Sim(num_blocks=400, budget=64, depth=depth, mixed_prefill_token_budget=10)
    add(sim, 0, 50)
    assert sim.step().num_tokens == 50
    sim.step()
    for key in range(1, 7):
        add(sim, key, 9 * key)
    mixed = 0
    while sim.scheduler._waiting or any(not tokens for tokens in sim.tokens.values()):
        plan = sim.step()
        if plan is not None and 0 in plan.keys:
            assert prompt_tokens(plan) <= 10
            mixed += prompt_tokens(plan) == 10
    assert mixed > 10
    sim.run()
    sim.check_answers()


def test_without_answers_prompts_have_the_whole_budget():
    sim = Sim(num_blocks=400, budget=64, mixed_prefill_token_budget=10)
    add(sim, 0, 40)
    add(sim, 1, 40)
    assert sim.step().num_tokens == 64
    assert sim.step().num_tokens == 1 + 10
    sim.run()
    sim.check_answers()


def test_a_short_prompt_does_not_wait_for_a_long_one():
    sim = Sim(num_blocks=400, budget=16)
    add(sim, 0, 200, 2)
    sim.step()
    add(sim, 1, 7, 2)
    plan = sim.step()
    # Half for the long one, the short one whole, the rest for the long one again.
    assert dict(zip(plan.keys.tolist(), plan.num_scheduled_tokens.tolist(), strict=True)) == {
        0: 9,
        1: 7,
    }
    assert sim.tokens[1]
    sim.run()
    sim.check_answers()


def test_a_short_prompt_passes_several_long_ones():
    sim = Sim(num_blocks=600, budget=16)
    for key in range(4):
        add(sim, key, 200, 2)
    for _ in range(8):
        sim.step()
    add(sim, 10, 12, 2)
    steps = 0
    while not sim.tokens[10]:
        sim.step()
        steps += 1
    assert steps <= 3
    sim.run()
    sim.check_answers()


def test_a_stream_of_short_prompts_leaves_a_long_one_half():
    sim = Sim(num_blocks=600, budget=16, max_num_seqs=32)
    add(sim, 0, 200, 2)
    sim.step()
    steps = 0
    while not sim.tokens[0]:
        for number in range(3):
            add(sim, 100 + 3 * steps + number, 12, 1)
        sim.step()
        steps += 1
    assert steps <= -(-(200 - 16) // 8)
    sim.run()
    sim.check_answers()


def test_alone_a_long_prompt_takes_everything():
    sim = Sim(num_blocks=400, budget=16)
    add(sim, 0, 200, 2)
    sim.step()
    assert [sim.step().num_tokens for _ in range(11)] == [16] * 11
    sim.run()
    sim.check_answers()


def test_what_a_long_prompt_gets_on_top_preempts_nobody():
    """Of 15 blocks the first holds 8, the second gets no more than the rest."""
    sim = Sim(num_blocks=16, budget=8, max_num_seqs=4, prefix_caching=False)
    add(sim, 0, 30, 2)
    add(sim, 1, 28, 2)
    sim.run()
    sim.check_answers()
    assert sim.totals["num_preemptions"] == 0


def test_the_mixed_budget_does_not_apply_to_prompts_that_must_be_whole():
    sim = Sim(
        num_blocks=400,
        budget=40,
        max_model_len=40,
        enable_chunked_prefill=False,
        mixed_prefill_token_budget=4,
    )
    for key in range(3):
        add(sim, key, 30, 5)
    sim.run()
    sim.check_answers()
