"""Work of a steady decode step does not grow with the number of rows."""

import sys
from collections import Counter

import pytest
from scheduler_helpers import Sim, make_request


def decoding(num_rows, depth=0):
    """A simulation in which ``num_rows`` rows decode, far from a block boundary."""
    sim = Sim(
        num_blocks=2 * num_rows + 1,
        block_size=64,
        max_num_seqs=256,
        budget=4096,
        depth=depth,
        max_model_len=64,
    )
    for key in range(num_rows):
        sim.add(make_request(key, [key % 20, 1, 2], 40, ignore_eos=True))
    for _ in range(4):
        sim.step()
    return sim


def calls_of(function):
    """Result and number of calls, Python's and C's, by name."""
    calls = Counter()

    def count(frame, event, arg):
        if event == "call":
            calls[frame.f_code.co_qualname] += 1
        elif event == "c_call":
            calls[arg.__qualname__] += 1

    sys.setprofile(count)
    try:
        result = function()
    finally:
        sys.setprofile(None)
    del calls["setprofile"]
    return result, calls


def calls_of_a_step(num_rows, depth):
    sim = decoding(num_rows, depth)
    total = Counter()
    plan, calls = calls_of(sim.scheduler.schedule)
    total += calls
    assert plan.num_tokens == len(plan.rows) == num_rows
    assert not plan.new_rows
    assert not len(plan.block_edits[0].rows)
    sim.in_flight.append((plan, sim.device.execute(plan)))
    booked = sim.in_flight.popleft()
    _, calls = calls_of(lambda: sim.scheduler.update(*booked))
    total += calls
    outputs, calls = calls_of(sim.scheduler.take_outputs)
    total += calls
    assert len(outputs.keys) == num_rows
    return total


@pytest.mark.parametrize("depth", [0, 1])
def test_a_steady_step_makes_the_same_calls_for_8_and_256_rows(depth):
    few, many = calls_of_a_step(8, depth), calls_of_a_step(256, depth)
    assert few == many
    assert few["Scheduler.schedule"] == few["Scheduler.update"] == 1


def test_a_blocked_queue_costs_nothing():
    """Requests that wait for a row are not looked at."""
    sim = decoding(256)
    _, alone = calls_of(sim.scheduler.schedule)
    sim = decoding(256)
    for key in range(1000, 1100):
        sim.add(make_request(key, [1, 2, 3], 4))
    _, queued = calls_of(sim.scheduler.schedule)
    assert sum(queued.values()) - sum(alone.values()) < 20
