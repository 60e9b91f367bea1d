"""An engine on a thread of this process, interrupted while it is built."""

import os
import signal
import threading
from types import SimpleNamespace

import pytest

from cardan.core.engine.client import InProcessClient


def engine_threads():
    return [thread for thread in threading.enumerate() if thread.name == "cardan-engine"]


@pytest.mark.parametrize("fails", [False, True])
def test_an_interrupt_leaves_nothing_running(fails):
    """What is half built is built to its end, and freed."""
    interrupted, closed = threading.Event(), []

    def build():
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupted.wait(20)
        if fails:
            raise ValueError("no such device")
        return SimpleNamespace(close=closed.append)

    # The handler runs in the main thread, which waits for the engine.
    def interrupt(number, frame):
        interrupted.set()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            InProcessClient(build)
    finally:
        signal.signal(signal.SIGINT, before)
    assert engine_threads() == []
    assert len(closed) == (0 if fails else 1)
