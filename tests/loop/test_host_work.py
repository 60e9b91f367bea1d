"""A step's work on the host grows with the rows that change, not with the rows that run.

Counted in calls, Python's and C's: a loop over requests makes calls for each, array work does not.
The count is of the whole step: plan, launch, results, outputs, and the message to the front.
"""

import gc
import sys

import msgspec
import pytest

from cardan.core.engine.messages import Outputs
from cardan.testing.digest_engine import DigestEngine, digest_request
from cardan.testing.fake.settings import FakeSettings

PROMPT = 4  # after the first step 11 more fit into the first block
# A sequence's place among the running ones is found by halving.
ORDERING = 16
ENCODER = msgspec.msgpack.Encoder()


def steady(num_rows, answers=None):
    """An engine in which ``num_rows`` rows decode; row i stops after ``answers[i]`` tokens."""
    fake = DigestEngine(
        FakeSettings(tier="executor", model="digest", depth=1),
        max_num_seqs=num_rows + 64,
        num_blocks=num_rows * 8 + 1024,
        budget=max(2048, num_rows * PROMPT),
    )
    for key in range(num_rows):
        length = 100 if answers is None else answers.get(key, 100)
        fake.engine.add(digest_request(key, [key % 97] * PROMPT, length))
    for _ in range(4):
        fake.engine.step()
    return fake


def calls_of_step(fake):
    """Calls of a step whose predecessor's result is there: waiting takes calls, too."""
    fake.device.queue.drain()
    return calls_of(lambda: step(fake))


def calls_of(action):
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    gc.disable()  # what is collected meanwhile is not the step's
    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def step(fake):
    outputs = fake.engine.step()
    ENCODER.encode(Outputs(outputs))
    return outputs


@pytest.fixture(scope="module")
def steady_calls():
    """Calls of a step in which nothing changes, by rows."""
    found = {}
    for num_rows in (8, 64, 512, 1024):
        fake = steady(num_rows)
        found[num_rows] = [calls_of_step(fake) for _ in range(4)]
        fake.executor.close()
    return found


def test_steady_steps_cost_the_same_at_any_number_of_rows(steady_calls):
    assert steady_calls[8] == steady_calls[64] == steady_calls[512] == steady_calls[1024]
    assert len(set(steady_calls[8])) == 1


@pytest.mark.parametrize("num_changed", [1, 8])
def test_joins_cost_the_same_whatever_else_runs(num_changed):
    found = []
    for num_rows in (8, 512):
        fake = steady(num_rows)
        for index in range(num_changed):
            fake.engine.add(digest_request(10_000 + index, [5] * PROMPT, 50))
        found.append(calls_of_step(fake))
        fake.executor.close()
    assert abs(found[0] - found[1]) <= ORDERING * num_changed


@pytest.mark.parametrize("num_changed", [1, 8])
def test_ends_cost_the_same_whatever_else_runs(num_changed):
    found = []
    for num_rows in (16, 512):
        fake = steady(num_rows, dict.fromkeys(range(num_changed), 6))
        calls = [calls_of_step(fake) for _ in range(5)]
        found.append(max(calls))
        fake.executor.close()
    assert abs(found[0] - found[1]) <= ORDERING * num_changed


def test_growing_rows_cost_by_their_number():
    """One block more for each of them: linear in the rows that need one."""
    found = {}
    for num_rows in (8, 16, 512):
        fake = steady(num_rows)
        found[num_rows] = max(calls_of_step(fake) for _ in range(14))
        fake.executor.close()
    each = (found[16] - found[8]) / 8
    predicted = found[8] + each * (512 - 8)
    assert found[512] == pytest.approx(predicted, rel=0.1)
    assert each < 80
