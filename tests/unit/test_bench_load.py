"""Loads against a server that is a function: what is sent when, and what is kept."""

import asyncio
import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cardan.bench.load import INTERRUPTED, Load, PreparedRequest, peak_concurrency
from cardan.bench.record import RequestRecord
from cardan.bench.serve import _load_notes, _timing_notes
from cardan.bench.serve_options import ServeOptions


class Server:
    """Answers after `seconds` (one number, or one a request); a gate holds all back."""

    def __init__(self, seconds=0.0, gate=None):
        self.seconds = itertools.cycle([seconds] if isinstance(seconds, float) else seconds)
        self.gate = gate
        self.bodies = []
        self.running = 0
        self.peak = 0

    async def send(self, body, record, start):
        clock = asyncio.get_running_loop().time
        record.sent = clock() - start
        self.bodies.append(body)
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            await asyncio.sleep(next(self.seconds))
            if self.gate is not None:
                await self.gate.wait()
            record.end = clock() - start
        finally:
            self.running -= 1


class VirtualTime(asyncio.SelectorEventLoop):
    """Sleeps are exact whatever the machine does: with nothing else to do the clock jumps."""

    def __init__(self):
        super().__init__()
        self._moment = 0.0
        select = self._selector.select

        def select_or_jump(timeout):
            events = select(0)
            if timeout and not events:
                self._moment += timeout
            return events

        self._selector.select = select_or_jump

    def time(self):
        return self._moment


def run_exactly(coroutine):
    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        return runner.run(coroutine)


def requests(count):
    return [PreparedRequest(str(index).encode(), index) for index in range(count)]


def test_an_open_load_sends_each_request_at_its_time():
    due = [0.0, 0.0, 0.03, 0.05]
    server = Server(0.5)
    outcome = run_exactly(Load(requests(4), server.send).run_open(due))
    assert [record.due for record in outcome.records] == due
    assert [record.index for record in outcome.records] == [0, 1, 2, 3]
    assert [record.prompt_tokens for record in outcome.records] == [0, 1, 2, 3]
    assert [record.sent for record in outcome.records] == pytest.approx(due)
    assert server.bodies == [b"0", b"1", b"2", b"3"]
    assert server.peak == 4  # nothing waits for an answer
    assert not outcome.is_interrupted
    assert outcome.num_unsent == 0
    assert outcome.lags == pytest.approx([0.0] * len(outcome.lags))
    assert len(outcome.lags) >= 50


def test_due_times_stay_when_requests_wait_for_their_turn():
    server = Server(0.05)
    load = Load(requests(6), server.send, max_concurrency=2)
    outcome = run_exactly(load.run_open(itertools.repeat(0.0)))
    assert server.peak == 2
    assert [record.due for record in outcome.records] == [0.0] * 6
    sent = [record.sent for record in outcome.records]
    assert sent == pytest.approx([0.0, 0.0, 0.05, 0.05, 0.1, 0.1])
    assert server.bodies == [str(index).encode() for index in range(6)]


@pytest.mark.parametrize("clients", [1, 3])
def test_a_closed_load_keeps_its_clients_busy(clients):
    server = Server([0.01, 0.03])
    ended = []
    load = Load(requests(9), server.send, max_concurrency=clients, on_end=ended.append)
    outcome = run_exactly(load.run_closed())
    assert server.peak == clients
    assert len(outcome.records) == len(ended) == 9
    assert all(record.due == record.sent for record in outcome.records)
    assert all(record.due == record.sent for record in ended)


def test_a_duration_ends_both_kinds_and_waits_for_what_runs():
    server = Server(0.2)
    load = Load(requests(100), server.send, duration=0.1)
    outcome = run_exactly(load.run_open(index * 0.03 for index in range(100)))
    assert [record.sent for record in outcome.records] == pytest.approx([0.0, 0.03, 0.06, 0.09])
    assert [record.end for record in outcome.records] == pytest.approx([0.2, 0.23, 0.26, 0.29])
    server = Server(0.04)
    load = Load(requests(100), server.send, duration=0.1)
    outcome = run_exactly(load.run_closed())
    assert [record.sent for record in outcome.records] == pytest.approx([0.0, 0.04, 0.08])
    assert [record.end for record in outcome.records] == pytest.approx([0.04, 0.08, 0.12])


def test_fewer_times_than_requests_end_the_load():
    outcome = asyncio.run(Load(requests(5), Server().send).run_open([0.0, 0.01]))
    assert len(outcome.records) == 2


def test_a_stop_keeps_what_was_answered_and_marks_what_was_not():
    async def run():
        gate = asyncio.Event()
        server = Server(gate=gate)
        answered = []

        async def send(body, record, start):
            if record.index < 2:
                record.end = 1.0
                return
            await server.send(body, record, start)

        load = Load(requests(8), send, max_concurrency=3, on_end=answered.append)
        task = asyncio.create_task(load.run_open([0.0] * 7 + [60.0]))
        while server.running < 3:
            await asyncio.sleep(0.001)
        task.cancel()
        return await task, answered, server

    outcome, answered, server = asyncio.run(run())
    assert outcome.is_interrupted
    assert server.running == 0
    assert [record.index for record in answered] == [0, 1]
    errors = {record.index: record.error for record in outcome.records}
    assert errors == {0: None, 1: None, 2: INTERRUPTED, 3: INTERRUPTED, 4: INTERRUPTED}
    assert outcome.num_unsent == 2  # of the seven that were due


def test_a_defect_of_the_sender_is_not_hidden():
    async def send(body, record, start):
        raise RuntimeError("a defect")

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(Load(requests(2), send).run_closed())
    assert "a defect" in str(caught.value.exceptions[0])


def test_lag_shows_a_blocked_loop():
    async def send(body, record, start):
        await asyncio.sleep(0.02)
        time.sleep(0.15)

    outcome = asyncio.run(Load(requests(2), send).run_closed())
    assert max(outcome.lags) > 0.1


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 10)), max_size=12))
def test_peak_concurrency_is_the_most_at_any_moment(spans):
    records = [
        RequestRecord(index, 0.0, float(begin), end=float(begin + length))
        for index, (begin, length) in enumerate(spans)
    ]
    most = max(
        sum(begin <= moment < begin + length for begin, length in spans) for moment in range(32)
    )
    assert peak_concurrency(records) == most


def test_notes_on_the_load():
    late = RequestRecord(0, 0.0, 0.5, end=1.0)
    load = Load(requests(1), Server().send)
    outcome = asyncio.run(load.run_open([0.0]))
    outcome.records = [late]
    [note] = _load_notes(ServeOptions(num_prompts=1, max_concurrency=2, trace="x"), outcome)
    assert note.startswith("1 requests waited in the load generator because 2 (max_concurrency)")
    assert _load_notes(ServeOptions(num_prompts=1), outcome) == []
    [note] = _load_notes(ServeOptions(num_prompts=1, duration=9.0), outcome)
    assert "raise --num-prompts" in note
    quiet = {"generator_lag_ms": {"p99": 1.2}}
    assert _timing_notes(quiet, 0) == []
    busy, uncounted = _timing_notes({"generator_lag_ms": {"p99": 12.0}}, 3)
    assert busy.startswith("the load generator was late by 12.0 ms (p99)")
    assert uncounted.startswith("3 answers came without usage")
    assert _timing_notes({"generator_lag_ms": {"p99": None}}, 0) == []
