"""The device for Intel's GPUs over a made-up ``torch.xpu``, whose tensors are the host's."""

from contextlib import contextmanager, nullcontext
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from cardan.core.interfaces.attention import KVLayout
from cardan.core.interfaces.capabilities import Capabilities, DeviceInfo
from cardan.core.interfaces.communication import GroupSpec
from cardan.core.interfaces.errors import (
    ConfigError,
    OutOfMemoryError,
    PluginError,
    UnsupportedError,
)
from cardan.core.types.kv import KVCacheGroup, KVCacheSpec
from cardan.platforms.xpu import device as device_module
from cardan.platforms.xpu.device import XpuDevice, open_device
from cardan.platforms.xpu.graph import capture_graph
from cardan.platforms.xpu.memory import XpuHostPool, XpuMemoryAllocator, memory_info

GIB = 1 << 30
HOST = torch.device("cpu")


class Runtime:
    """What ``torch.xpu`` has, as torch's own sources define it; ``calls`` in their order."""

    def __init__(self):
        self.calls = []
        self.device_ids = [0xE20B, 0x56A0]
        self.info = (6 * GIB, 12 * GIB)
        self.reserved, self.allocated, self.peak = 2 * GIB, GIB, 3 * GIB
        self.current = SimpleNamespace(name="current")
        self.capture_error = None

    def device_count(self):
        if isinstance(self.device_ids, Exception):
            raise self.device_ids
        return len(self.device_ids)

    def get_device_properties(self, device=None):
        index = device if isinstance(device, int) else 0
        return SimpleNamespace(device_id=self.device_ids[index], total_memory=12 * GIB)

    def mem_get_info(self, device=None):
        if self.info is None:
            raise RuntimeError("The device doesn't support querying the available free memory")
        return self.info

    def memory_reserved(self, device=None):
        return self.reserved

    def memory_allocated(self, device=None):
        return self.allocated

    def max_memory_reserved(self, device=None):
        return self.peak

    def reset_peak_memory_stats(self, device=None):
        self.calls.append("reset peak")

    def empty_cache(self):
        self.calls.append("empty")

    def synchronize(self, device=None):
        self.calls.append("synchronize")

    def current_stream(self, device=None):
        return self.current

    def device(self, device):
        return nullcontext()

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def graph_pool_handle(self):
        return "pool"

    def make_stream(self, device=None, priority=0):
        return Queue(self, priority)

    def make_event(self):
        return Mark(self)

    def make_graph(self):
        return Recording(self)


class Queue:
    def __init__(self, runtime, priority):
        self.runtime, self.priority, self.device = runtime, priority, HOST

    def synchronize(self):
        self.runtime.calls.append("stream synchronize")

    def wait_event(self, event):
        self.runtime.calls.append(("wait", event.stream))


class Mark:
    def __init__(self, runtime):
        self.runtime, self.stream = runtime, None

    def record(self, stream=None):
        self.stream = stream

    def query(self):
        return True

    def synchronize(self):
        self.runtime.calls.append("event synchronize")


class Recording:
    def __init__(self, runtime):
        self.runtime = runtime

    def capture_begin(self, pool=None):
        self.runtime.calls.append(("begin", pool))

    def capture_end(self):
        if self.runtime.capture_error is not None:
            raise self.runtime.capture_error
        self.runtime.reserved += 7
        self.runtime.calls.append("end")

    def replay(self):
        self.runtime.calls.append("replay")

    def reset(self):
        self.runtime.calls.append("reset")


@pytest.fixture
def runtime(monkeypatch):
    made = Runtime()
    module = import_module("torch.xpu")
    for name in {*dir(made)} & {*dir(module)}:
        if not name.startswith("_"):
            monkeypatch.setattr(module, name, getattr(made, name))
    monkeypatch.setattr(module, "Stream", made.make_stream)
    monkeypatch.setattr(module, "Event", made.make_event)
    monkeypatch.setattr(module, "XPUGraph", made.make_graph)
    return made


def info(index=0, device_id="0xe20b"):
    return DeviceInfo(
        platform="xpu",
        index=index,
        name="Arc",
        arch="xe2_hpg",
        details={"device_id": device_id},
    )


def opened(index=0, device_id="0xe20b", **capabilities):
    return open_device(info(index, device_id), Capabilities(**capabilities), lambda: None)


def test_opens_the_device_of_this_kind(runtime):
    assert opened().torch_device == torch.device("xpu", 0)
    assert opened(1, "0x56a0").torch_device.index == 1
    runtime.device_ids = [0x56A0, 0xE20B]
    assert opened(0, "0xe20b").torch_device.index == 1


def test_says_what_torch_sees_instead(runtime):
    runtime.device_ids = [0x56A0, 0x56A0]
    with pytest.raises(PluginError, match="ZE_ENABLE_PCI_ID_DEVICE_ORDER=1"):
        opened()
    runtime.device_ids = []
    with pytest.raises(PluginError, match=r"among its XPU devices \(none\)"):
        opened()
    runtime.device_ids = RuntimeError("no loader")
    with pytest.raises(PluginError, match="cannot start Level Zero: no loader"):
        opened()


def test_exact_memory_counts_what_torch_keeps(runtime):
    found = opened().memory_info()
    assert (found.total, found.free, found.exact) == (12 * GIB, 7 * GIB, True)


def test_memory_that_the_driver_refuses_to_tell(runtime):
    runtime.info = None
    found = memory_info(HOST, lambda: None, is_integrated=False)
    assert (found.total, found.free, found.exact) == (12 * GIB, 11 * GIB, False)
    found = memory_info(HOST, lambda: (8 * GIB, 3 * GIB), is_integrated=True)
    assert (found.total, found.free, found.exact) == (8 * GIB, 4 * GIB, False)
    unknown = memory_info(HOST, lambda: None, is_integrated=True)
    assert not unknown.exact


def test_streams_and_events(runtime):
    device = opened()
    stream = device.stream(priority=-1)
    assert stream.stream.priority == -1
    before = device.event()
    stream.wait(before)
    assert runtime.calls == [("wait", runtime.current)]
    with stream as entered, stream:
        assert entered is stream
        assert runtime.current is stream.stream
    assert runtime.current is not stream.stream
    assert stream.record().query()
    stream.wait(SimpleNamespace(synchronize=lambda: runtime.calls.append("foreign")))
    assert runtime.calls[-1] == "foreign"


def test_steps_have_a_stream_of_their_own(runtime):
    device, outer = opened(), runtime.current
    with device.inference():
        assert runtime.current is not outer
        assert torch.is_inference_mode_enabled()
    assert runtime.current is outer


def test_graphs_share_a_pool(runtime):
    device = opened()
    launched = []
    first = device.capture(lambda: launched.append(1))
    second = device.capture(lambda: launched.append(2), first)
    assert launched == [1, 2]
    assert runtime.calls.count("empty") == 1
    assert [item for item in runtime.calls if item[0] == "begin"] == [("begin", "pool")] * 2
    assert first.num_bytes == 7
    second.replay()
    second.release()
    second.release()
    assert runtime.calls.count("reset") == 1
    with pytest.raises(UnsupportedError, match="released"):
        second.replay()


def test_what_cannot_be_captured(runtime):
    stream = Queue(runtime, 0)
    runtime.capture_error = RuntimeError("SYCL graph is not supported\nby this driver")
    with pytest.raises(UnsupportedError, match=r"SYCL graph is not supported$"):
        capture_graph(lambda: None, stream, None)
    runtime.capture_error = torch.OutOfMemoryError("none left")
    with pytest.raises(OutOfMemoryError, match=r"device\.enforce_eager"):
        capture_graph(lambda: None, stream, None)

    def fails():
        raise ValueError("own fault")

    runtime.capture_error = None
    with pytest.raises(ValueError, match="own fault"):
        capture_graph(fails, stream, None)
    assert runtime.calls[-1] == "end"


def test_pools_are_zeroed_on_the_main_stream(runtime):
    main = Queue(runtime, 0)
    memory = XpuMemoryAllocator(HOST, main, lambda: memory_info(HOST, lambda: None, False))
    spec = KVCacheSpec(
        kind="full", block_size=4, num_kv_heads=2, k_head_dim=8, v_head_dim=8, dtype="float32"
    )
    group = KVCacheGroup((0, 1), spec)
    pool = memory.kv_pool(group, KVLayout(), 3)
    assert not pool.logical().any()
    assert runtime.calls == ["empty", "stream synchronize"]
    assert memory.peak_of(lambda: runtime.calls.append("work")) == GIB
    memory.close()
    assert pool.num_bytes == 0


def test_host_pools(runtime):
    pool = XpuHostPool(100, pinned=False)
    pool.buffer()[:] = bytes(range(100))
    assert bytes(pool.buffer()[98:]) == b"bc"
    pool.close()
    pool.close()
    with pytest.raises(ValueError, match="closed"):
        pool.buffer()
    with pytest.raises(ConfigError, match="num_bytes must be at least 0"):
        XpuHostPool(-1, pinned=False)


@pytest.mark.parametrize("has_xccl", [True, False])
def test_collectives_take_device_tensors_where_torch_has_xccl(
    runtime, monkeypatch, tmp_path, has_xccl
):
    """The made-up back end works on the host, as the device's tensors do here."""
    made = []

    def group(store, rank, size, options):
        made.append(options)
        return torch.distributed.ProcessGroupGloo(store, rank, size, options._timeout)

    maker = type("Maker", (), {"Options": SimpleNamespace, "__call__": staticmethod(group)})()
    monkeypatch.setattr(device_module.dist, "is_xccl_available", lambda: has_xccl)
    monkeypatch.setattr(device_module.dist, "ProcessGroupXCCL", maker, raising=False)
    device = opened()
    monkeypatch.setattr(device, "_torch_device", HOST)
    communicator = device.communicator(GroupSpec(0, 1, f"file://{tmp_path}/store"))
    assert communicator.all_reduce(torch.ones(3)).tolist() == [1, 1, 1]
    assert len(made) == has_xccl
    device.close()


def test_closing_gives_back_what_torch_keeps(runtime):
    device = opened()
    assert isinstance(device, XpuDevice)
    device.synchronize()
    device.close()
    assert runtime.calls == ["synchronize", "synchronize", "empty"]
