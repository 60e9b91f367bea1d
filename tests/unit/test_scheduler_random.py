"""Random workloads: every sequence gets the tokens it gets alone, and nothing leaks."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scheduler_device import EOS, VOCAB
from scheduler_helpers import Sim, make_request

from cardan.core.types.errors import QueueFullError
from cardan.core.types.request import MediaSpan

QUICK = settings(
    max_examples=120,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
PREFIXES = [[random.Random(i).randrange(VOCAB) for _ in range(40)] for i in range(2)]


@dataclass
class Arrival:
    step: int
    request: object
    aborts: dict = field(default_factory=dict)


@st.composite
def arrivals(draw, max_model_len, most=6, plain=False):
    out = []
    step = 0
    for number in range(draw(st.integers(1, most))):
        step += draw(st.integers(0, 4))
        shared = draw(st.integers(0, min(30, max_model_len - 3)))
        prompt = PREFIXES[draw(st.integers(0, 1))][:shared]
        rest = draw(st.integers(0 if shared else 1, min(9, max_model_len - shared - 1)))
        prompt = prompt + [draw(st.integers(0, VOCAB - 1)) for _ in range(rest)]
        most_tokens = min(14, max_model_len - len(prompt))
        n = draw(st.sampled_from([1, 1, 1, 2, 4]))
        kwargs = {}
        if not plain:
            kwargs = draw(
                st.fixed_dictionaries(
                    {},
                    optional={
                        "cache_salt": st.sampled_from(["a", "b"]),
                        "adapter": st.just("a"),
                        "media": st.sampled_from(
                            [(MediaSpan(1, 2, "m"),), (MediaSpan(5, 9, "k"),)]
                        ),
                        "priority": st.integers(-1, 1),
                        "stop_token_ids": st.sampled_from([(5,), (5, EOS), (1, 2, 5, 7, 8, 9)]),
                        "ignore_eos": st.booleans(),
                        "min_tokens": st.integers(0, 4),
                        "logprobs": st.just(1),
                        "prompt_logprobs": st.just(1),
                        "seed": st.integers(0, 2),
                    },
                )
            )
        max_tokens = draw(st.integers(0, most_tokens))
        kwargs["min_tokens"] = min(kwargs.get("min_tokens", 0), max_tokens)
        request = make_request(100 * number, prompt, max_tokens, n=n, **kwargs)
        aborts = {}
        if not plain:
            for index in range(n):
                if draw(st.integers(0, 5)) == 0:
                    aborts[100 * number + index] = step + draw(st.integers(0, 20))
        out.append(Arrival(step, request, aborts))
    return out


@st.composite
def scenarios(draw, depths=(0, 1, 2), plain=False):
    block_size = draw(st.sampled_from([1, 2, 4, 8]))
    num_tokens = draw(st.sampled_from([32, 40, 64, 160]))
    chunked = plain or draw(st.integers(0, 4)) > 0
    config = {
        "num_blocks": -(-num_tokens // block_size) + 1,
        "block_size": block_size,
        "num_groups": draw(st.integers(1, 2)),
        "prefix_caching": draw(st.integers(0, 4)) > 0,
        "budget": draw(st.sampled_from([1, 7, 16, 500])) if chunked else 200,
        "max_num_seqs": draw(st.sampled_from([1, 2, 3, 8])),
        "depth": draw(st.sampled_from(depths)),
        "policy": draw(st.sampled_from(["fcfs", "priority"])),
        "enable_chunked_prefill": chunked,
    }
    if chunked:
        config["long_prefill_token_threshold"] = draw(st.sampled_from([0, 0, 1, 3]))
        config["mixed_prefill_token_budget"] = draw(st.sampled_from([None, None, 1, 6]))
    length = -(-num_tokens // block_size) * block_size
    return config, draw(arrivals(min(length, 44), plain=plain))


def never(key):
    return False


def play(config, arriving, fails=never, spoils=never, max_steps=4000):
    sim = Sim(**config)
    todo = sorted(arriving, key=lambda item: item.step)
    aborts = {key: step for item in arriving for key, step in item.aborts.items()}
    number = 0
    while todo or sim.scheduler.has_work or sim.in_flight:
        while todo and todo[0].step <= number:
            sim.add(todo.pop(0).request)
        for key in [key for key, step in aborts.items() if step == number]:
            sim.abort(key)
        sim.step(fails, spoils)
        number += 1
        assert number < max_steps, "no end in sight"
    sim.check_idle()
    return sim


@QUICK
@given(scenarios())
def test_every_sequence_gets_the_tokens_it_gets_alone(scenario):
    sim = play(*scenario)
    sim.check_answers()
    sim.check_stats()


@settings(QUICK, max_examples=40)
@given(scenarios(), st.integers(0, 2**20))
def test_a_failure_ends_one_sequence_and_spreads_to_no_other_request(scenario, seed):
    config, arriving = scenario
    rng = random.Random(seed)
    single = [item for item in arriving if item.request.params.n == 1]
    sim = play(config, single, lambda key: rng.random() < 0.06, lambda key: rng.random() < 0.03)
    sim.check_answers(may_fail=True)


@st.composite
def bursts(draw):
    """Requests at once on one prefix, and what happens to some of them."""
    prompts = [
        PREFIXES[0][: draw(st.integers(1, 30))] + draw(st.lists(st.integers(0, 3), max_size=3))
        for _ in range(draw(st.integers(2, 8)))
    ]
    arriving = []
    for number, prompt in enumerate(prompts):
        kwargs = {"priority": draw(st.integers(0, 1)), "n": draw(st.sampled_from([1, 1, 2]))}
        if draw(st.integers(0, 5)) == 0:
            kwargs["prompt_logprobs"] = 1
        if draw(st.integers(0, 5)) == 0:
            kwargs["cache_salt"] = "a"
        request = make_request(100 * number, prompt, draw(st.integers(1, 5)), **kwargs)
        aborts = {}
        if draw(st.integers(0, 3)) == 0:
            aborts[100 * number] = draw(st.integers(0, 8))
        arriving.append(Arrival(draw(st.sampled_from([0, 0, 0, 1])), request, aborts))
    return arriving


@QUICK
@given(scenarios(), bursts(), st.integers(0, 2**20), st.sampled_from([0.0, 0.0, 0.1]))
def test_bursts_on_one_prefix_whatever_becomes_of_the_one_that_computes_it(
    scenario, arriving, seed, rate
):
    config, _others = scenario
    length = (config["num_blocks"] - 1) * config["block_size"]
    fitting = [
        item
        for item in arriving
        if len(item.request.prompt_token_ids) + item.request.max_tokens <= length
    ]
    rng = random.Random(seed)
    sim = play(config, fitting, spoils=lambda key: rng.random() < rate)
    sim.check_answers(may_fail=rate > 0)
    if not rate:
        sim.check_stats()


@settings(QUICK, max_examples=40)
@given(scenarios(plain=True))
def test_without_aborts_counters_add_up(scenario):
    config, arriving = scenario
    sim = play(config, arriving)
    sim.check_answers()
    sim.check_stats()
    assert not sim.aborted


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_long_busy_run_in_a_tiny_pool(depth, policy):
    rng = random.Random(depth)
    arriving = []
    for number in range(60):
        prompt = PREFIXES[0][: rng.randrange(1, 30)] + [rng.randrange(VOCAB)] * rng.randrange(3)
        request = make_request(
            10 * number,
            prompt,
            rng.randrange(0, 12),
            n=rng.choice([1, 1, 2, 4]),
            priority=rng.randrange(3),
            ignore_eos=True,
            seed=rng.randrange(3),
        )
        arriving.append(Arrival(number * 2, request))
    config = {
        "num_blocks": 14,
        "depth": depth,
        "policy": policy,
        "budget": 16,
        "max_model_len": 48,
        "num_groups": 2,
    }
    sim = play(config, arriving)
    sim.check_answers()
    sim.check_stats()
    assert sim.totals["num_preemptions"] > 0
    assert sim.totals["prefix_hits"] > 0


@QUICK
@given(st.data())
def test_queue_caps_refuse_and_break_nothing(data):
    sim = Sim(
        num_blocks=17,
        max_num_seqs=2,
        budget=8,
        max_num_queued_reqs=4,
        max_num_queued_tokens=40,
        depth=data.draw(st.integers(0, 1)),
    )
    for number in range(data.draw(st.integers(1, 12))):
        n = data.draw(st.integers(1, 4))
        request = make_request(10 * number, PREFIXES[0][: data.draw(st.integers(1, 10))], 5, n=n)
        waiting = len(sim.scheduler._waiting)
        tokens = sim.scheduler._waiting.num_tokens
        full = waiting + n > 4 or tokens + n * len(request.prompt_token_ids) > 40
        if full:
            with pytest.raises(QueueFullError, match="the queue is full"):
                sim.add(request)
        else:
            sim.add(request)
        for _ in range(data.draw(st.integers(0, 3))):
            sim.step()
    sim.run()
    sim.check_answers()
