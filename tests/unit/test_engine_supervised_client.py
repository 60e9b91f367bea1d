import os
import queue
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from engine_stub import request

from cardan.core.engine.engine_child import EngineChild
from cardan.core.engine.process_client import ProcessClient
from cardan.core.engine.supervised_client import RestartPolicy, SupervisedClient
from cardan.core.types.engine_info import EngineHealth
from cardan.core.types.errors import ConfigError, EngineDeadError

STUB = Path(__file__).parent / "engine_stub.py"
PATIENCE = 30.0


class Sink:
    def __init__(self):
        self.items = queue.SimpleQueue()

    def on_outputs(self, outputs):
        self.items.put(outputs)

    def on_death(self, reason):
        self.items.put(reason)

    def next(self):
        return self.items.get(timeout=PATIENCE)


def spawner(what, spawned=None):
    def spawn():
        child = EngineChild([sys.executable, str(STUB)], what.encode(), {}, end_timeout=2.0)
        if spawned is not None:
            spawned.append(child)
        return child

    return spawn


def supervise(what, spawned, **policy):
    policy = {"backoff": 0.01, **policy}
    client = SupervisedClient(spawner(what, spawned), 1.0, RestartPolicy(**policy))
    sink = Sink()
    client.connect(sink)
    return client, sink


def wait_for(client, state):
    deadline = time.monotonic() + PATIENCE
    while client.health().state != state:
        assert time.monotonic() < deadline, client.health()
        time.sleep(0.02)
    return client.health()


def test_a_killed_engine_is_replaced_and_serves_again():
    spawned = []
    client, sink = supervise("answer", spawned)
    try:
        client.submit(request(1))
        first = sink.next().token_ids[0]
        assert first == spawned[0].process.pid
        spawned[0].process.send_signal(signal.SIGKILL)
        assert sink.next() == "the engine process was ended by SIGKILL"
        assert wait_for(client, "ready").num_restarts == 1
        client.submit(request(2))
        assert sink.next().token_ids[0] == spawned[1].process.pid != first
    finally:
        client.close()
    assert [child.process.poll() is not None for child in spawned] == [True, True]


def test_requests_meanwhile_are_refused_with_the_reason(tmp_path):
    marker = tmp_path / "then"
    spawned = []
    client, sink = supervise(f"answer>{marker}", spawned, backoff=30.0)
    try:
        marker.write_text("broken")  # the first restart fails, the second is 30 s away
        spawned[0].kill()
        sink.next()
        deadline = time.monotonic() + PATIENCE
        while "no memory left" not in client.health().reason:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        with pytest.raises(EngineDeadError, match="starting: it is restarted, because no memory"):
            client.submit(request(1))
        client.abort([1])  # nothing to end
    finally:
        began = time.monotonic()
        client.close()
    assert time.monotonic() - began < 20, "closing waited for the next start"


def test_too_many_deaths_are_final():
    spawned = []
    client, sink = supervise("answer", spawned, max_restarts=2)
    try:
        for count in range(3):
            wait_for(client, "ready")
            spawned[count].kill()
            sink.next()
        health = wait_for(client, "dead")
        assert health.num_restarts == 2
        assert health.reason == (
            "the engine process was ended by SIGKILL; not started again after 2 restarts "
            "within 600 s"
        )
        with pytest.raises(EngineDeadError, match="not started again"):
            client.submit(request(1))
    finally:
        client.close()
    assert len(spawned) == 3


def test_old_deaths_do_not_count():
    spawned = []
    client, sink = supervise("answer", spawned, max_restarts=1, window=0.0)
    try:
        for count in range(3):
            wait_for(client, "ready")
            spawned[count].kill()
            sink.next()
        assert wait_for(client, "ready").num_restarts == 3
    finally:
        client.close()


def test_a_stuck_engine_is_ended_and_replaced():
    spawned = []
    client = SupervisedClient(
        first_then_answer("hang", spawned), 0.5, RestartPolicy(hang_timeout=1.0)
    )
    sink = Sink()
    client.connect(sink)
    try:
        client.submit(request(1))
        reason = sink.next()
        assert reason.startswith("the engine hung: no step has finished for ")
        assert reason.endswith("raise the limit, hang_timeout (1 s)")
        wait_for(client, "ready")
        client.submit(request(2))
        assert sink.next().keys == [2]
    finally:
        client.close()


def first_then_answer(what, spawned):
    first, following = spawner(what, spawned), spawner("answer", spawned)
    return lambda: following() if spawned else first()


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("limp", "the device is lost"),
        ("babble", "a message of the engine could not be handled: "),
    ],
)
def test_a_failed_engine_that_does_not_end_is_replaced_too(what, reason):
    spawned = []
    client = SupervisedClient(first_then_answer(what, spawned), 60.0, RestartPolicy())
    sink = Sink()
    client.connect(sink)
    try:
        client.submit(request(1))
        assert sink.next().startswith(reason)
        wait_for(client, "ready")
        client.submit(request(2))
        assert sink.next().keys == [2]
        assert spawned[0].process.poll() is not None
    finally:
        client.close()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(12, "Cannot allocate memory"), "Cannot allocate memory"),
        (ConfigError("the device is gone"), "the device is gone"),
        (KeyError("x"), "KeyError: 'x'"),
    ],
)
def test_a_process_that_cannot_even_be_made_counts_as_a_restart(error, reason):
    spawned = []
    first = spawner("answer", spawned)

    def spawn():
        if spawned:
            raise error
        return first()

    client = SupervisedClient(spawn, 60.0, RestartPolicy(max_restarts=2, backoff=0.01))
    sink = Sink()
    client.connect(sink)
    try:
        spawned[0].kill()
        sink.next()
        health = wait_for(client, "dead")
        assert reason in health.reason
        assert health.reason.endswith("; not started again after 2 restarts within 600 s")
    finally:
        client.close()


def test_a_supervisor_that_stood_still_does_not_end_a_sound_engine(monkeypatch):
    spawned = []
    client, sink = supervise("answer", spawned)
    try:
        # As seen first after a long stop: the beats that came meanwhile are still unread.
        seen = []
        sound = EngineHealth("ready")
        late = EngineHealth("stuck", "no step has finished for 99 s", 99.0)

        def health(self):
            seen.append(self)
            return late if len(seen) == 1 else sound

        monkeypatch.setattr(ProcessClient, "health", health)
        deadline = time.monotonic() + PATIENCE
        while len(seen) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        client.submit(request(1))
        assert sink.next().keys == [1]
    finally:
        client.close()
    assert len(spawned) == 1


def test_the_first_start_has_no_second_try():
    spawned = []
    with pytest.raises(ConfigError, match="no memory left"):
        supervise("broken", spawned)
    assert len(spawned) == 1
    assert spawned[0].process.poll() is not None


def test_without_restarts_death_is_final():
    spawned = []
    client, sink = supervise("answer", spawned, max_restarts=0)
    try:
        os.kill(spawned[0].process.pid, signal.SIGTERM)
        assert "SIGTERM" in sink.next()
        assert wait_for(client, "dead").reason == "the engine process was ended by SIGTERM"
    finally:
        client.close()


def test_closing_ends_an_engine_that_reads_nothing():
    spawned = []
    client = SupervisedClient(spawner("deaf", spawned), 60.0, RestartPolicy())
    client.connect(Sink())
    large = replace(request(1), prompt_token_ids=list(range(1_000_000)))
    client.submit(large)
    time.sleep(0.2)  # the socket is full by then
    thread = threading.Thread(target=client.close, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert spawned[0].process.poll() == -signal.SIGKILL


def test_closing_twice_leaves_no_process():
    spawned = []
    client, sink = supervise("answer", spawned)
    client.close()
    client.close()
    assert spawned[0].process.poll() == 0
    assert sink.next() == "the engine was shut down"
    assert client.health().state == "dead"


def test_a_child_that_reads_nothing_holds_up_nobody():
    spawned = []
    client, sink = supervise("answer", spawned)
    spawned[0].process.send_signal(signal.SIGSTOP)
    try:
        began = time.monotonic()
        # Far more than a socket holds.
        for key in range(40):
            client.submit(request(key, num_prompt_tokens=20_000))
        client.abort([1])
        assert time.monotonic() - began < 10
        spawned[0].process.send_signal(signal.SIGCONT)
        assert {sink.next().keys[0] for _ in range(40)} == set(range(40))
    finally:
        spawned[0].process.send_signal(signal.SIGCONT)
        client.close()
