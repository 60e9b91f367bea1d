"""An engine's process does not outlive the one that it works for."""

import sys
from pathlib import Path

import pytest

from cardan.core.engine.engine_child import EngineChild

IDLE = """
import socket
import sys
import threading

from engine_stub import INFO

from cardan.core.engine.client import EngineParts
from cardan.core.engine.engine_process import receive_config, run_engine
from cardan.core.engine.loop import Unobserved
from cardan.core.types.outputs import StepOutputs


class IdleEngine:
    has_work = False

    def step(self):
        return StepOutputs()

    def fail_all(self, message):
        return StepOutputs()


sock = socket.socket(fileno=int(sys.argv[1]))
what = receive_config(sock)


def close(reason):
    if what == b"hang":
        threading.Event().wait()


parts = EngineParts(IdleEngine(), INFO, Unobserved(), lambda: None, close)
sys.exit(run_engine(sock, lambda: parts))
"""


@pytest.mark.parametrize(("what", "code"), [(b"end", 0), (b"hang", 1)])
def test_it_ends_with_its_parent_even_if_its_device_cannot_be_closed(what, code):
    env = {"PYTHONPATH": str(Path(__file__).parent)}
    child = EngineChild([sys.executable, "-c", IDLE], what, env)
    try:
        child.await_ready()
        child.connection.close()
        assert child.process.wait(25) == code
    finally:
        child.kill()
        child.process.wait()
