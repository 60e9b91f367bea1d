"""An engine that has been idle for a while gives back what it does not need, once."""

import ctypes
import json
import subprocess
import sys
import threading
import time

import pytest

from cardan.core.engine import loop as loop_module
from cardan.core.engine.loop import EngineLoop, Unobserved
from cardan.core.engine.messages import Abort, Shutdown
from cardan.core.types.outputs import StepOutputs


class IdleEngine:
    has_work = False

    def abort(self, keys):
        pass

    def step(self):
        return StepOutputs()

    def fail_all(self, message):
        return StepOutputs()

    def sleep_levels(self):
        return ()


@pytest.fixture
def rests(monkeypatch):
    """A loop on a thread, and the times at which it rested."""
    monkeypatch.setattr(loop_module, "IDLE_REPORT_SECONDS", 0.02)
    times = []
    loop = EngineLoop(
        IdleEngine(),
        lambda outputs: None,
        Unobserved(),
        lambda: None,
        lambda answer: None,
        lambda: times.append(time.monotonic()),
    )
    thread = threading.Thread(target=loop.run)
    thread.start()
    yield loop, times
    loop.submit(Shutdown())
    thread.join()


def await_length(items, length):
    deadline = time.monotonic() + 20
    while len(items) < length:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_rests_once_after_each_time_of_work(rests):
    loop, times = rests
    await_length(times, 1)  # after the start
    time.sleep(0.2)
    assert len(times) == 1
    loop.submit(Abort([1]))
    await_length(times, 2)
    time.sleep(0.2)
    assert len(times) == 2


FREED_BLOCKS = """
import ctypes, json

from cardan.core.engine.host_heap import give_back_freed_memory

def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
size, count = 64 << 10, 1000
blocks = [libc.malloc(ctypes.c_size_t(size)) for _ in range(count)]
for block in blocks:
    ctypes.memset(block, 1, size)
held = resident_bytes()
last = libc.malloc(ctypes.c_size_t(size))  # of no hole: it keeps the heap's end where it is
for block in blocks:
    libc.free(ctypes.c_void_p(block))
freed = resident_bytes()
give_back_freed_memory()
print(json.dumps({"size": size * count, "held": held, "freed": freed, "rest": resident_bytes()}))
"""


def test_freed_memory_goes_back_to_the_host():
    """Blocks below the size that the C library maps one by one stay in its heap when freed.

    In a process of its own, whose heap no other test has filled or emptied.
    """
    if not hasattr(ctypes.CDLL(None), "malloc_trim"):
        pytest.skip("the C library is not glibc")
    answer = subprocess.run(
        [sys.executable, "-c", FREED_BLOCKS], capture_output=True, text=True, check=True
    )
    seen = json.loads(answer.stdout)
    assert seen["held"] - seen["freed"] < seen["size"] // 2
    assert seen["held"] - seen["rest"] > seen["size"] * 9 // 10
