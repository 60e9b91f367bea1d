"""L1: opening and closing a device, and what is left of it afterwards."""

import gc

import numpy as np
import pytest

from cardan.core.interfaces.capabilities import Capabilities, DeviceInfo
from cardan.core.interfaces.device import Device
from cardan.core.interfaces.errors import UnsupportedError
from cardan.core.interfaces.memory import MemoryAllocator
from cardan.core.interfaces.platform import Platform
from cardan.testing.conformance.results import not_supported

LEVEL = "L1"

_OPENINGS = 3
_POOL_BYTES = 16 << 20


def test_opened_device_has_its_facts(
    cardan_own_device: Device, cardan_device_info: DeviceInfo, cardan_capabilities: Capabilities
) -> None:
    """An opened device carries the facts that its platform stated, and an allocator."""
    assert cardan_own_device.info == cardan_device_info
    assert cardan_own_device.capabilities == cardan_capabilities
    assert isinstance(cardan_own_device.memory, MemoryAllocator)
    assert not any(cardan_own_device.memory.stats().by_tag.values()), (
        "bytes are held from the start"
    )
    cardan_own_device.synchronize()


def test_opens_again(cardan_platform: Platform, cardan_device_info: DeviceInfo) -> None:
    """A device can be opened again after it was closed, and computes each time."""
    from cardan.testing.conformance.device_bench import DeviceBench

    for _ in range(_OPENINGS):
        device = cardan_platform.open(cardan_device_info)
        try:
            bench = DeviceBench(device)
            pool = bench.pool()
            bench.fill(pool, 1.0)
            assert bench.blocks(pool)[1][2] == 103.0
        finally:
            device.close()


def test_close_is_idempotent(cardan_platform: Platform, cardan_device_info: DeviceInfo) -> None:
    """Closing twice, the allocator as well, is no error."""
    device = cardan_platform.open(cardan_device_info)
    device.memory.close()
    device.memory.close()
    device.close()
    device.close()


def test_nothing_is_held_after_close(
    cardan_platform: Platform, cardan_device_info: DeviceInfo
) -> None:
    """After close() the device accounts no bytes, and its pools are gone."""
    from cardan.testing.conformance.device_bench import DeviceBench

    device = cardan_platform.open(cardan_device_info)
    try:
        bench = DeviceBench(device)
        with device.memory.region("weights"):
            bench.pool()
        pool = bench.pool()
        assert sum(device.memory.stats().by_tag.values()) > 0, "pools are not accounted"
    finally:
        device.close()
    held = {tag: size for tag, size in device.memory.stats().by_tag.items() if size}
    assert not held, f"after close() the device still holds {held}"
    assert pool.num_bytes == 0, "a pool of a closed device still has bytes"
    with pytest.raises(UnsupportedError):
        pool.view(0)


def test_memory_comes_back(cardan_platform: Platform, cardan_device_info: DeviceInfo) -> None:
    """What pools took is free again when the device was closed, time after time."""
    free = [_free_after_use(cardan_platform, cardan_device_info) for _ in range(_OPENINGS + 1)]
    # The first opening may start a runtime that stays; from then on nothing may go.
    lost = free[1] - free[-1]
    assert lost < _POOL_BYTES, f"{_OPENINGS - 1} openings lost {lost / 2**20:.1f} MiB: {free}"


def _free_after_use(platform: Platform, info: DeviceInfo) -> int:
    from cardan.testing.conformance.device_bench import SPEC, DeviceBench

    device = platform.open(info)
    try:
        if not device.memory_info().exact:
            not_supported("memory_info() is an estimate on this device")
        bench = DeviceBench(device)
        num_blocks = -(-_POOL_BYTES // (2 * SPEC.bytes_per_block))
        pool = bench.pool(num_blocks=num_blocks)
        assert pool.num_bytes >= _POOL_BYTES
        del pool
    finally:
        device.close()
    gc.collect()
    again = platform.open(info)
    free = again.memory_info().free
    again.close()
    return free


def test_inference_context(cardan_own_device: Device) -> None:
    """The context of steps can be entered again and again, and survives an exception."""
    import torch

    from cardan.testing.conformance.device_bench import DeviceBench

    bench = DeviceBench(cardan_own_device)
    for number in range(3):
        with cardan_own_device.inference():
            found = torch.full((4,), float(number), device=bench.where) + 1
        cardan_own_device.synchronize()
        assert found.to("cpu").tolist() == [number + 1.0] * 4
        with pytest.raises(ZeroDivisionError), cardan_own_device.inference():
            _ = number / 0
    assert torch.is_grad_enabled(), "leaving inference() does not restore autograd"


def test_tensors_come_back(
    cardan_own_device: Device, cardan_capabilities: Capabilities, cardan_rng: np.random.Generator
) -> None:
    """Tensors of every computing dtype, and of indices, return from the device bit by bit."""
    import torch

    from cardan.testing.conformance.device_bench import DeviceBench

    bench = DeviceBench(cardan_own_device)
    for name in (*cardan_capabilities.dtypes, "int32", "int64", "bool"):
        values = torch.from_numpy(cardan_rng.standard_normal((33, 7)) * 10)
        host = values.to(getattr(torch, name))
        with cardan_own_device.inference():
            there = host.to(bench.where).clone()
        cardan_own_device.synchronize()
        assert torch.equal(there.to("cpu"), host), f"{name} changes on its way"
