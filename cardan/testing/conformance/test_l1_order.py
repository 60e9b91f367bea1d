"""L1: streams and events order work, and say when it is done."""

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cardan.core.interfaces.capabilities import Capabilities
from cardan.core.interfaces.device import Device, Event
from cardan.core.interfaces.errors import UnsupportedError
from cardan.testing.conformance.device_bench import DeviceBench
from cardan.testing.conformance.results import not_supported

LEVEL = "L1"

_DEADLINE_S = 60.0
_NUM_STEPS = 4


@pytest.fixture
def bench(cardan_own_device: Device, cardan_capabilities: Capabilities) -> DeviceBench:
    """A device that works while the host goes on."""
    if not cardan_capabilities.async_depth and not cardan_capabilities.streams:
        not_supported("the device is synchronous: async_depth is 0, streams is not declared")
    return DeviceBench(cardan_own_device)


@pytest.fixture
def streams(cardan_capabilities: Capabilities) -> None:
    """Only where streams are declared."""
    if not cardan_capabilities.streams:
        not_supported("streams is not declared")


def _launch(bench: DeviceBench, value: float) -> tuple[Tensor, Event]:
    """Long work whose result is on its way to the host, and the event after it."""
    device = bench.device
    out = torch.zeros(64, device=bench.where)
    device.synchronize()
    with device.inference():
        bench.start_long_work(out, value)
        seen = out.to("cpu", non_blocking=True)
        event = device.event()
    return seen, event


def _wait(event: Event) -> None:
    event.synchronize()


def _poll(event: Event) -> None:
    end = time.monotonic() + _DEADLINE_S
    while not event.query():
        assert time.monotonic() < end, f"query() is not true after {_DEADLINE_S:g} s"
        time.sleep(0.001)


@pytest.mark.parametrize("wait", [_wait, _poll], ids=["synchronize", "query"])
def test_event_follows_work(bench: DeviceBench, wait: Callable[[Event], None]) -> None:
    """When an event is reached, the work before it is done and its result on the host."""
    for value in (3.0, 5.0):
        seen, event = _launch(bench, value)
        wait(event)
        assert seen.tolist() == [value] * 64, "the event was reached before its work was done"
        event.synchronize()
        assert event.query(), "an event that was reached is open again"


def test_device_synchronize_follows_work(bench: DeviceBench) -> None:
    """Device.synchronize() returns when all queued work is done."""
    seen, _ = _launch(bench, 7.0)
    bench.device.synchronize()
    assert seen.tolist() == [7.0] * 64, "synchronize() returned before the work was done"


def test_many_small_operations(bench: DeviceBench) -> None:
    """Thousands of small operations run in the order in which they were queued."""
    device = bench.device
    with device.inference():
        value = torch.zeros(17, dtype=torch.int64, device=bench.where)
        for number in range(1500):
            value = value * 3 % 1_000_003 + number
        seen = value.to("cpu", non_blocking=True)
        event = device.event()
    event.synchronize()
    want = 0
    for number in range(1500):
        want = want * 3 % 1_000_003 + number
    assert seen.tolist() == [want] * 17


def test_steps_in_flight(bench: DeviceBench) -> None:
    """Several launches may wait on the device; each event tells of its own."""
    device = bench.device
    with device.inference():
        state = torch.zeros(64, device=bench.where)
        launched = []
        for _ in range(_NUM_STEPS):
            step = torch.zeros(64, device=bench.where)
            bench.start_long_work(step, 1.0)
            state.add_(step)
            launched.append((state.clone().to("cpu", non_blocking=True), device.event()))
    for number, (seen, event) in enumerate(launched):
        event.synchronize()
        assert seen.tolist() == [number + 1.0] * 64


@pytest.mark.usefixtures("streams")
def test_stream_waits_for_another(bench: DeviceBench) -> None:
    """Work after wait(event) sees the other stream's work; the host need not wait."""
    device = bench.device
    producer, consumer = device.stream(), device.stream()
    out = torch.zeros(64, device=bench.where)
    double = torch.zeros(64, device=bench.where)
    device.synchronize()
    with device.inference():
        with producer:
            bench.start_long_work(out, 4.0)
            made = producer.record()
        with consumer:
            consumer.wait(made)
            double.copy_(out * 2)
            used = consumer.record()
    used.synchronize()
    device.synchronize()
    assert double.to("cpu").tolist() == [8.0] * 64, "the stream did not wait for the other one"


@pytest.mark.usefixtures("streams")
def test_stream_waits_for_the_main_one(bench: DeviceBench) -> None:
    """A stream that waits for an event of the device's main stream sees its work."""
    device = bench.device
    stream = device.stream()
    out = torch.zeros(64, device=bench.where)
    seen = torch.zeros(64, device=bench.where)
    device.synchronize()
    with device.inference():
        bench.start_long_work(out, 6.0)
        event = device.event()
        with stream:
            stream.wait(event)
            seen.copy_(out)
            done = stream.record()
    done.synchronize()
    device.synchronize()
    assert seen.to("cpu").tolist() == [6.0] * 64


def test_undeclared_members_say_so(
    cardan_own_device: Device, cardan_capabilities: Capabilities
) -> None:
    """Streams and events work where they are declared; a refusal elsewhere has a reason."""
    refusals = {
        "stream": _refusal(cardan_own_device.stream),
        "event": _refusal(cardan_own_device.event),
    }
    for name, refusal in refusals.items():
        assert refusal is None or refusal.strip(), f"{name}() is refused without a reason"
    if cardan_capabilities.streams:
        assert refusals["stream"] is None, f"streams are declared, but: {refusals['stream']}"
    is_asynchronous = cardan_capabilities.streams or cardan_capabilities.async_depth > 0
    if is_asynchronous and cardan_own_device.torch_device is not None:
        assert refusals["event"] is None, f"steps may be in flight, but: {refusals['event']}"


def _refusal(member: Callable[[], object]) -> str | None:
    try:
        member()
    except UnsupportedError as error:
        return str(error)
    return None
