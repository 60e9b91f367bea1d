"""Opened devices of the platform for AMD's GPUs, with a stand-in for torch's HIP build, in which
the host's memory plays the device's."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from cardan.core.interfaces import torch_device
from cardan.core.interfaces.attention import KVLayout
from cardan.core.interfaces.capabilities import Capabilities, DeviceInfo
from cardan.core.interfaces.errors import OutOfMemoryError, PluginError, UnsupportedError
from cardan.core.types.kv import KVCacheGroup, KVCacheSpec
from cardan.platforms.rocm.device import open_device

MIB = 1 << 20
GROUP = KVCacheGroup(("0", "1"), KVCacheSpec("full", 4, 2, 8, 8, "float32"))


def info(bus="0000:01:00.0", arch="gfx942", ordinal="0"):
    details = {"bus": bus, "ordinal": ordinal, "render": "renderD128", "driver": "6.12.12"}
    return DeviceInfo(platform="rocm", index=0, name="MI300X", arch=arch, details=details)


def properties(bus=1, arch="gfx942:sramecc+:xnack-"):
    place = {} if bus is None else {"pci_domain_id": 0, "pci_bus_id": bus, "pci_device_id": 0}
    return SimpleNamespace(gcnArchName=arch, **place)


class Hip:
    """What torch's HIP build answers; ``calls`` are those whose order counts."""

    def __init__(self):
        self.seen = [properties(1)]
        self.archs = ["gfx90a", "gfx942"]
        self.total, self.free = 192 << 10, 100 << 10  # MiB
        self.reserved, self.allocated = 30, 10
        self.calls = []
        self.locked = {}

    def properties(self, index):
        if isinstance(self.seen, Exception):
            raise self.seen
        return self.seen[index]

    def note(self, name, result=None):
        def called(*args, **named):
            self.calls.append(name)
            return result

        return called


class Stream:
    device = torch.device("cpu", 0)

    def __init__(self, *args, **named):
        pass

    def synchronize(self):
        pass

    def wait_event(self, event):
        event.waited = True


class Recording:
    def __init__(self, hip):
        self.hip = hip

    def capture_begin(self, pool, capture_error_mode):
        assert capture_error_mode == "thread_local"
        self.hip.calls.append(("begin", pool))

    def capture_end(self):
        self.hip.free -= 3
        self.hip.calls.append("end")

    def replay(self):
        self.hip.calls.append("replay")

    def reset(self):
        self.hip.calls.append("reset")


@pytest.fixture
def hip(monkeypatch):
    made = Hip()
    monkeypatch.setattr("torch.version.hip", "6.4.43484", raising=False)
    plain = {
        "device_count": lambda: 1 if isinstance(made.seen, Exception) else len(made.seen),
        "get_device_properties": made.properties,
        "get_arch_list": lambda: made.archs,
        "Stream": Stream,
        "CUDAGraph": lambda: Recording(made),
        "graph_pool_handle": made.note("pool", (0, 1)),
        "device": lambda device: nullcontext(),
        "stream": lambda stream: nullcontext(),
        "synchronize": made.note("synchronize"),
        "empty_cache": made.note("empty"),
        "mem_get_info": lambda device=None: (made.free * MIB, made.total * MIB),
        "memory_reserved": lambda device=None: made.reserved * MIB,
        "memory_allocated": lambda device=None: made.allocated * MIB,
        "cudart": lambda: SimpleNamespace(
            cudaHostRegister=lambda address, num_bytes, flags: 2 if num_bytes > MIB else 0,
            cudaHostUnregister=made.note("unlock"),
        ),
    }
    for name, value in plain.items():
        monkeypatch.setattr(f"torch.cuda.{name}", value)
    monkeypatch.setattr(
        torch_device, "_zeros", lambda shape, dtype, device: torch.zeros(shape, dtype=dtype)
    )
    return made


@pytest.mark.parametrize(
    ("seen", "wanted", "index"),
    [
        ([properties(3), properties(1)], info(), 1),
        # This torch tells no addresses: the place among those that HIP counts.
        ([properties(None, "gfx1036"), properties(None)], info(ordinal="1"), 1),
        ([properties(None), properties(None)], info(ordinal="2"), None),
        # Parts of one divided GPU.
        ([properties(1), properties(1)], info("0000:01:00.1", ordinal="1"), 1),
        ([properties(3)], info(), None),
        ([properties(1, "gfx90a")], info(), None),
        ([], info(), None),
    ],
)
def test_which_device_of_torch_is_opened(hip, seen, wanted, index):
    hip.seen = seen
    if index is None:
        with pytest.raises(PluginError, match=r"does not see MI300X .* groups render and video"):
            open_device(wanted, Capabilities())
    else:
        assert open_device(wanted, Capabilities()).torch_device == torch.device("cuda", index)


def test_a_torch_that_cannot_open_it_says_what_to_do(hip, monkeypatch):
    hip.archs = ["gfx1100"]
    with pytest.raises(PluginError, match=r"no kernels for MI300X \(gfx942\), only for gfx1100"):
        open_device(info(), Capabilities())
    hip.seen = RuntimeError("HIP error: invalid device ordinal")
    with pytest.raises(PluginError, match="cannot start HIP: HIP error"):
        open_device(info(), Capabilities())
    monkeypatch.setattr("torch.version.hip", None)
    with pytest.raises(PluginError, match="is no build for ROCm"):
        open_device(info(), Capabilities())


def test_memory_is_what_the_driver_has_free_and_torch_keeps(hip):
    memory = open_device(info(), Capabilities()).memory_info()
    assert memory.total == hip.total * MIB
    assert memory.free == (hip.free + 20) * MIB


def test_pools_are_counted_and_refused(hip, monkeypatch):
    device = open_device(info(), Capabilities())
    with device.memory.region("kv"):
        pool = device.memory.kv_pool(GROUP, KVLayout(), 3)
    assert device.memory.stats().by_tag["kv"] == pool.num_bytes
    with pytest.raises(OutOfMemoryError):
        device.memory.kv_pool(GROUP, KVLayout(), 1 << 40)
    device.memory.host_pool(100).close()
    assert hip.calls[-1] == "unlock"

    def tell_again(*args, **named):
        raise RuntimeError("HIP error: out of memory")

    monkeypatch.setattr("torch.zeros", tell_again)
    with pytest.raises(OutOfMemoryError, match="HIP error 2 while locking it"):
        device.memory.host_pool(2 * MIB)


def test_sleep_keeps_weights_and_loses_graphs(hip):
    device = open_device(info(), Capabilities(sleep_levels=(1, 2)))
    with device.memory.region("kv"):
        pool = device.memory.kv_pool(GROUP, KVLayout(), 2)
    pool.logical().fill_(3.0)
    device.memory.sleep(1, ("kv",))
    assert device.memory.stats().by_tag["kv"] == 0
    assert {"kv", "graphs"} <= set(device.memory.wake().lost)
    assert not pool.logical().any()


def test_a_captured_step_is_replayed_and_released(hip):
    device = open_device(info(), Capabilities())
    done = []
    graph = device.capture(lambda: done.append(1))
    assert done == [1]
    assert graph.num_bytes == 3 * MIB
    second = device.capture(lambda: None, graph)
    assert hip.calls.count(("begin", (0, 1))) == 2
    assert hip.calls.count("pool") == 1
    second.replay()
    graph.release()
    assert hip.calls[-3:] == ["replay", "synchronize", "reset"]
    with pytest.raises(UnsupportedError, match="was released"):
        graph.replay()


def test_work_that_hip_does_not_capture(hip):
    def launch():
        raise RuntimeError("HIP error: operation not permitted when stream is capturing")

    with pytest.raises(UnsupportedError, match="cannot be captured"):
        open_device(info(), Capabilities()).capture(launch)


def test_it_closes_though_it_failed(hip, monkeypatch):
    device = open_device(info(), Capabilities())

    def fail(device=None):
        raise RuntimeError("HIP error: an illegal memory access")

    monkeypatch.setattr("torch.cuda.synchronize", fail)
    with pytest.raises(RuntimeError, match="illegal"):
        device.close()
    assert hip.calls[-1] == "empty"
