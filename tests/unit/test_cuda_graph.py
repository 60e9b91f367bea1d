"""Captures of the platform for NVIDIA's GPUs, of a made-up runtime."""

from contextlib import nullcontext

import pytest
import torch

from cardan.core.interfaces.errors import OutOfMemoryError, UnsupportedError
from cardan.platforms.shared.gpu.graph import capture_graph


class Stream:
    device = torch.device("cpu", 3)

    def synchronize(self):
        pass


class Runtime:
    """torch's captures; ``calls`` are those that must pair, with their arguments."""

    def __init__(self):
        self.calls = []
        self.free = 1000 << 20
        self.end_error = None
        self.pools = 0

    def graph(self):
        return Recording(self)

    def pool(self):
        self.pools += 1
        return (0, self.pools)


class Recording:
    def __init__(self, runtime):
        self.runtime = runtime

    def capture_begin(self, pool, capture_error_mode):
        self.runtime.calls.append(("begin", pool))

    def capture_end(self):
        if self.runtime.end_error is not None:
            raise self.runtime.end_error
        self.runtime.free -= 7 << 20
        self.runtime.calls.append("end")

    def replay(self):
        self.runtime.calls.append("replay")

    def reset(self):
        self.runtime.calls.append("reset")


@pytest.fixture
def runtime(monkeypatch):
    made = Runtime()

    def noted(name):
        return lambda *args: made.calls.append((name, *args))

    monkeypatch.setattr("torch.cuda.CUDAGraph", made.graph)
    monkeypatch.setattr("torch.cuda.graph_pool_handle", made.pool)
    monkeypatch.setattr("torch.cuda.stream", lambda stream: nullcontext())
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: made.calls.append("empty"))
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (made.free, 0))
    monkeypatch.setattr("torch.cuda.synchronize", noted("synchronize"))
    monkeypatch.setattr("torch._C._cuda_endAllocateToPool", noted("end pool"), raising=False)
    monkeypatch.setattr("torch._C._cuda_releasePool", noted("release pool"), raising=False)
    return made


def test_graphs_share_a_pool_and_wait_for_their_own_device(runtime):
    launched = []
    first = capture_graph(lambda: launched.append(1), Stream(), None)
    second = capture_graph(lambda: launched.append(2), Stream(), first)
    assert launched == [1, 2]
    assert runtime.calls == ["empty", ("begin", (0, 1)), "end", ("begin", (0, 1)), "end"]
    assert first.num_bytes == 7 << 20
    runtime.calls.clear()
    second.replay()
    second.release()
    second.release()
    assert runtime.calls == ["replay", ("synchronize", Stream.device), "reset"]
    assert second.num_bytes == 0
    with pytest.raises(UnsupportedError, match="was released"):
        second.replay()


def test_a_graph_of_a_device_that_failed_is_released(runtime, monkeypatch):
    graph = capture_graph(lambda: None, Stream(), None)

    def fail(device):
        raise torch.AcceleratorError("an illegal memory access")

    monkeypatch.setattr("torch.cuda.synchronize", fail)
    with pytest.raises(torch.AcceleratorError):
        graph.release()
    assert runtime.calls[-1] == "reset"


def test_an_exception_of_the_launch_reaches_the_caller(runtime):
    with pytest.raises(ZeroDivisionError):
        capture_graph(lambda: 1 / 0, Stream(), None)
    assert runtime.calls[-1] == "end"
    with pytest.raises(RuntimeError, match="of its own"):
        capture_graph(raising(RuntimeError("of its own")), Stream(), None)


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("operation not permitted when stream is capturing"),
        RuntimeError("Triton Error [CUDA]: operation not permitted when stream is capturing"),
    ],
)
def test_a_void_capture_ends_and_gives_its_pool_up(runtime, error):
    """torch does neither where CUDA refuses to end the capture."""
    runtime.end_error = torch.AcceleratorError("operation failed due to a previous error")
    with pytest.raises(UnsupportedError, match=r"cannot be captured: .*is capturing"):
        capture_graph(raising(error), Stream(), None)
    assert runtime.calls[-2:] == [("end pool", 3, (0, 1)), ("release pool", 3, (0, 1))]


def test_a_capture_that_is_void_at_its_end(runtime):
    runtime.end_error = torch.AcceleratorError("operation failed due to a previous error")
    with pytest.raises(UnsupportedError, match="cannot be captured"):
        capture_graph(lambda: None, Stream(), None)
    assert runtime.calls[-1] == ("release pool", 3, (0, 1))


def test_too_little_memory_says_what_to_lower(runtime):
    with pytest.raises(OutOfMemoryError, match=r"1000 MiB that are free; lower cache\.memory"):
        capture_graph(raising(torch.OutOfMemoryError("no")), Stream(), None)
    assert runtime.calls[-1] == "end"


def raising(error):
    def launch():
        raise error

    return launch
