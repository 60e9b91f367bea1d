"""Several samples of one request: shared prompt, copied tail, separate ends."""

import pytest
from scheduler_helpers import Sim, make_request

from cardan.core.types.request import FinishReason

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


@pytest.mark.parametrize("num_prompt", [1, 4, 5, 8, 9, 10])
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_samples_share_the_prompt_and_differ(num_prompt, prefix_caching, depth):
    sim = Sim(prefix_caching=prefix_caching, depth=depth, num_groups=2)
    sim.add(make_request(0, PROMPT[:num_prompt], 12, n=4, ignore_eos=True))
    sim.run()
    sim.check_answers()
    sim.check_stats()
    assert len({tuple(tokens) for tokens in sim.tokens.values()}) == 4
    # The first computes the prompt, the others its last token.
    assert [sim.started[key].num_cached_tokens for key in range(4)] == [0] + [num_prompt - 1] * 3
    assert sum(plan.num_tokens for plan in sim.plans) == num_prompt + 3 + 4 * 11


def test_a_partly_filled_block_is_copied_and_a_full_one_shared():
    sim = Sim()
    sim.add(make_request(0, PROMPT[:6], 8, n=2, ignore_eos=True))
    sim.step()
    plan = sim.step()
    [copies] = plan.block_copies
    parent, child = (sim.scheduler._sequences[key].blocks.blocks[0] for key in (0, 1))
    assert (copies.sources.tolist(), copies.targets.tolist()) == ([parent[1]], [child[1]])
    assert parent[0] == child[0]
    assert sim.cache.ref_counts(0, [parent[0], parent[1], child[1]]) == [2, 1, 1]
    sim.run()
    sim.check_answers()


def test_nothing_is_copied_when_the_last_prompt_token_starts_a_block():
    sim = Sim()
    sim.add(make_request(0, PROMPT[:9], 4, n=2, ignore_eos=True))
    sim.run()
    assert not any(len(plan.block_copies[0].sources) for plan in sim.plans)
    sim.check_answers()


@pytest.mark.parametrize("aborted", [0, 1, 2])
@pytest.mark.parametrize("after", [0, 1, 2, 5])
def test_one_sample_is_aborted_and_the_others_go_on(aborted, after):
    sim = Sim(depth=1)
    sim.add(make_request(0, PROMPT, 8, n=3, ignore_eos=True))
    for _ in range(after):
        sim.step()
    sim.abort(aborted)
    sim.run()
    sim.check_answers()
    reasons = [sim.finished[key].reason for key in range(3)]
    assert [reason is FinishReason.ABORT for reason in reasons] == [
        key == aborted for key in range(3)
    ]


def test_only_the_first_sample_reports_the_prompt():
    sim = Sim(depth=1, budget=4)
    sim.add(make_request(0, PROMPT, 3, n=3, prompt_logprobs=1, logprobs=1, ignore_eos=True))
    sim.run()
    sim.check_answers()


@pytest.mark.parametrize("num_prompt", range(1, 10))
@pytest.mark.parametrize("depth", [0, 1])
def test_samples_of_nothing_end(num_prompt, depth):
    """With no tokens to generate the other samples may find every token cached."""
    sim = Sim(depth=depth)
    sim.add(make_request(0, PROMPT[:num_prompt], 0, n=3, prompt_logprobs=1))
    sim.run(max_steps=20)
    sim.check_answers()
    assert all(finish.reason is FinishReason.LENGTH for finish in sim.finished.values())


def test_samples_wait_for_blocks_rather_than_compute_the_prompt_again():
    sim = Sim(num_blocks=6, max_num_seqs=4, budget=100)
    sim.add(make_request(0, PROMPT, 9, n=4, ignore_eos=True))
    sim.run()
    sim.check_answers()
    sim.check_stats()


def test_a_sample_that_first_failed_to_start_names_its_blocks_right():
    # Sample 1 looks for a cached prefix, finds no room, and shares the prompt a step later.
    sim = Sim(num_blocks=8, block_size=2, max_num_seqs=3, budget=100)
    sim.add(make_request(0, PROMPT[:7], 3, n=2, ignore_eos=True))
    sim.add(make_request(10, [9, 8, 7], 3, ignore_eos=True))
    sim.run()
    sim.cache.reset_prefix_cache()
    sim.add(make_request(20, PROMPT[:7], 3, n=2, ignore_eos=True))
    sim.run()
    sim.check_answers()


def test_a_later_request_leaves_rows_to_the_samples_that_wait_for_the_prompt():
    sim = Sim(max_num_seqs=3)
    sim.add(make_request(0, PROMPT, 6, n=2, ignore_eos=True))
    for key in (10, 20):
        sim.add(make_request(key, [key, 1, 2], 6, ignore_eos=True))
    sim.step()
    assert set(sim.started) == {0, 10}
    sim.run()
    sim.check_answers()
    assert sim.totals["num_preemptions"] == 0
