"""L1: captured work reads its inputs anew at each replay."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cardan.core.interfaces.capabilities import Capabilities
from cardan.core.interfaces.device import Device
from cardan.core.interfaces.errors import UnsupportedError
from cardan.testing.conformance.device_bench import DeviceBench
from cardan.testing.conformance.results import not_supported

LEVEL = "L1"

_SIDE = 16


@pytest.fixture
def bench(cardan_own_device: Device, cardan_capabilities: Capabilities) -> DeviceBench:
    """A device that captures graphs."""
    if cardan_capabilities.graphs == "none":
        not_supported("graphs is none")
    return DeviceBench(cardan_own_device)


class _Work:
    """``out = relu(x @ w) + 1`` over fixed tensors; x has equal entries, w is an identity."""

    def __init__(self, bench: DeviceBench) -> None:
        self.bench = bench
        self.x = torch.zeros(_SIDE, _SIDE, device=bench.where)
        self.w = torch.eye(_SIDE, device=bench.where)
        self.out = torch.zeros(_SIDE, _SIDE, device=bench.where)
        bench.device.synchronize()
        with bench.device.inference():
            self.launch()  # libraries start up outside of captures
        bench.device.synchronize()

    def launch(self) -> None:
        self.out.copy_(torch.relu(self.x @ self.w) + 1)

    def check(self, replay: Callable[[], None], value: float) -> None:
        """Change the input, run, and look."""
        with self.bench.device.inference():
            self.x.fill_(value)
            self.out.fill_(-1.0)
            replay()
        found, want = self.result(), max(value, 0.0) + 1
        assert found == want, f"for the input {value} the result is {found}, not {want}"

    def result(self) -> float:
        self.bench.device.synchronize()
        found = self.out.to("cpu")
        assert _is_constant(found), f"the result is not equal everywhere: {found}"
        return float(found[0, 0])


def test_replay_computes_anew(bench: DeviceBench) -> None:
    """Replaying after the inputs changed gives the new result, again and again."""
    work = _Work(bench)
    with bench.device.inference():
        graph = bench.device.capture(work.launch)
    for value in (2.0, -3.0, 5.0, 5.0, 0.5):
        work.check(graph.replay, value)
    assert graph.num_bytes >= 0
    graph.release()


def test_graphs_share_a_pool(bench: DeviceBench) -> None:
    """Graphs that share memory replay in any order; releasing one leaves the other alone."""
    first, second = _Work(bench), _Work(bench)
    with bench.device.inference():
        large = bench.device.capture(first.launch)
        small = bench.device.capture(second.launch, pool=large)
    for value in (1.0, 4.0):
        first.check(large.replay, value)
        second.check(small.replay, value + 1)
        first.check(large.replay, value + 2)
    small.release()
    first.check(large.replay, 9.0)
    large.release()


def test_device_goes_on_after_release(bench: DeviceBench) -> None:
    """After a release the device computes eagerly, and captures again."""
    for value in (1.0, 2.0, 3.0):
        work = _Work(bench)
        with bench.device.inference():
            graph = bench.device.capture(work.launch)
        work.check(graph.replay, value)
        graph.release()
        work.check(work.launch, value + 0.5)


def test_failed_capture_leaves_the_device_usable(bench: DeviceBench) -> None:
    """An exception inside a capture reaches the caller, and the device goes on."""
    work = _Work(bench)

    def launch() -> None:
        work.launch()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), bench.device.inference():
        bench.device.capture(launch)
    work.check(work.launch, 3.0)
    with bench.device.inference():
        graph = bench.device.capture(work.launch)
    work.check(graph.replay, 4.0)
    graph.release()


def test_undeclared_capture_says_so(
    cardan_own_device: Device, cardan_capabilities: Capabilities
) -> None:
    """A device without graphs refuses to capture, with a reason."""
    if cardan_capabilities.graphs != "none":
        not_supported("graphs are declared")
    with pytest.raises(UnsupportedError, match=r"\S"):
        cardan_own_device.capture(lambda: None)


def _is_constant(found: Tensor) -> bool:
    return bool((found == found.flatten()[0]).all())
