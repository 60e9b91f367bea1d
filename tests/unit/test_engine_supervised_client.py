import os
import queue
import signal
import sys
import time
from pathlib import Path

import pytest
from engine_stub import request

from cardan.core.engine.engine_child import EngineChild
from cardan.core.engine.supervised_client import RestartPolicy, SupervisedClient
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
        child = EngineChild([sys.executable, str(STUB)], what.encode(), {})
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
    first = spawner("hang", spawned)
    following = spawner("answer", spawned)
    client = SupervisedClient(lambda: following() if spawned else first(), 1.0, RestartPolicy())
    sink = Sink()
    client.connect(sink)
    try:
        client.submit(request(1))
        assert sink.next().startswith("the engine hung: no step has finished for ")
        wait_for(client, "ready")
        client.submit(request(2))
        assert sink.next().keys == [2]
    finally:
        client.close()


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


def test_closing_twice_leaves_no_process():
    spawned = []
    client, sink = supervise("answer", spawned)
    client.close()
    client.close()
    assert spawned[0].process.poll() == 0
    assert sink.next() == "the engine was shut down"
    assert client.health().state == "dead"
