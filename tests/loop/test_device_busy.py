"""The loop keeps an asynchronous device busy: no gap between a step's end and the next one."""

import queue
import time

import pytest

from cardan.core.engine.client import InProcessClient
from cardan.testing.digest_engine import DigestEngine, digest_answer, digest_request
from cardan.testing.fake.settings import FakeSettings

STEP_MS = 5.0
WINDOW_STEPS = 60
PROMPT = 8
# The host shares two cores with whatever else runs: the best of some windows is looked at.
WINDOWS = 4


class Sink:
    def __init__(self):
        self.items = queue.SimpleQueue()

    def on_outputs(self, outputs):
        self.items.put(outputs)

    def on_death(self, reason):
        self.items.put(reason)


def prompt_of(key):
    return [(key + place) % 97 for place in range(PROMPT)]


def collect(sink, tokens, until):
    """Take outputs until ``until(outputs)``; dead engines fail the test."""
    while True:
        outputs = sink.items.get(timeout=60)
        assert not isinstance(outputs, str), outputs
        for key, token_id in zip(outputs.keys, outputs.token_ids, strict=True):
            tokens.setdefault(key, []).append(token_id)
        if until(outputs):
            return


def busy_share(fake, sink, tokens):
    """Share of a window's time in which the device computed."""
    counters = fake.counters
    steps, busy, began = counters.steps, counters.busy_seconds, time.monotonic()
    collect(sink, tokens, lambda _: counters.steps >= steps + WINDOW_STEPS)
    return (counters.busy_seconds - busy) / (time.monotonic() - began)


@pytest.mark.timing
@pytest.mark.parametrize("num_rows", [1, 64, 512])
def test_a_device_of_5_ms_steps_is_kept_busy(num_rows, record_property):
    num_tokens = WINDOW_STEPS * (WINDOWS + 2)
    max_model_len = PROMPT + num_tokens
    fake = DigestEngine(
        FakeSettings(tier="executor", model="digest", depth=1, step_ms=STEP_MS),
        max_num_seqs=num_rows,
        num_blocks=num_rows * (max_model_len // 16 + 1) + 2,
        budget=max(512, num_rows * PROMPT),
        max_model_len=max_model_len,
    )
    client = InProcessClient(fake.parts)
    sink = Sink()
    client.connect(sink)
    tokens, finished = {}, set()
    try:
        for key in range(num_rows):
            client.submit(digest_request(key, prompt_of(key), num_tokens))
        collect(sink, tokens, lambda _: len(tokens) == num_rows)
        shares = [busy_share(fake, sink, tokens) for _ in range(WINDOWS)]
        record_property("busy_shares", [round(share, 3) for share in shares])

        def all_done(outputs):
            finished.update(outputs.finished)
            return len(finished) == num_rows

        collect(sink, tokens, all_done)
    finally:
        client.close()
    assert max(shares) >= 0.9, shares
    # Fast, and right.
    for key in range(0, num_rows, 97):
        assert tokens[key] == digest_answer(prompt_of(key), num_tokens)


def test_the_next_step_is_queued_before_a_result_is_awaited():
    """What keeps the device busy, whatever the clock says."""
    fake = DigestEngine(FakeSettings(tier="executor", model="digest", depth=1))
    order = []
    sample = fake.executor.sample

    def noted_sample(step, mask=None):
        handle = sample(step, mask)
        order.append(("launch", step.step_id))
        result = handle.result

        def noted_result():
            order.append(("await", step.step_id))
            return result()

        handle.result = noted_result
        return handle

    fake.executor.sample = noted_sample
    fake.run([digest_request(key, prompt_of(key), 20) for key in range(3)])
    launched = {step: place for place, (what, step) in enumerate(order) if what == "launch"}
    awaited = {step: place for place, (what, step) in enumerate(order) if what == "await"}
    # The last plans only free rows.
    for step in range(19):
        assert launched[step + 1] < awaited[step]
        assert awaited[step] < launched[step + 2]
