"""The torch device, its pools and block copies, through the CPU platform and by itself."""

from dataclasses import replace

import pytest
import torch

from cardan.core.interfaces.attention import KVLayout
from cardan.core.interfaces.capabilities import Capabilities, DeviceInfo
from cardan.core.interfaces.communication import GroupSpec
from cardan.core.interfaces.errors import ConfigError, OutOfMemoryError, UnsupportedError
from cardan.core.interfaces.memory import MemoryInfo
from cardan.core.interfaces.torch_device import TorchDevice, physical_shape
from cardan.core.types.kv import KVCacheGroup, KVCacheSpec
from cardan.platforms.cpu.attention import CpuAttention
from cardan.platforms.cpu.device import CpuDevice
from cardan.platforms.cpu.platform import CpuPlatform

INFO = DeviceInfo(platform="test", index=0, name="test", arch="test")
SPEC = KVCacheSpec("full", 4, 3, 8, 8, "float32")
GROUP = KVCacheGroup((0, 2), SPEC)


def device(free=1 << 20):
    return TorchDevice(INFO, Capabilities(), "cpu", lambda: MemoryInfo(1 << 30, free))


def fill(pool):
    """Give every element of the pool its own number, through the layers' views."""
    for slot in range(len(pool.group.layers)):
        view = pool.view(slot)
        view.copy_(torch.arange(view.numel()).view(view.shape) + 100_000 * slot)


def test_opening_sets_the_threads():
    before = torch.get_num_threads()
    platform = CpuPlatform()
    info = platform.devices()[0]
    try:
        opened = platform.open(replace(info, details={**info.details, "num_threads": "1"}))
        assert isinstance(opened, CpuDevice)
        assert torch.get_num_threads() == 1
        assert opened.torch_device == torch.device("cpu")
        assert opened.capabilities.dtypes
        assert 0 < opened.memory_info().free <= opened.memory_info().total
        opened.synchronize()
        opened.close()
    finally:
        torch.set_num_threads(before)


def test_what_is_optional_is_unsupported():
    opened = device()
    for call in (opened.stream, opened.event, lambda: opened.capture(lambda: None)):
        with pytest.raises(UnsupportedError):
            call()
    with pytest.raises(UnsupportedError):
        opened.memory.host_pool(10)
    with opened.inference():
        assert torch.is_inference_mode_enabled()


def test_pool_is_zero_and_has_the_layouts_shape():
    pool = device().memory.kv_pool(GROUP, KVLayout(), 5)
    assert pool.num_blocks == 5
    assert pool.view(1).shape == (5, 2, 4, 3, 8)
    assert pool.view(1).is_contiguous()
    assert not pool.view(0).any()
    assert pool.num_bytes == 5 * GROUP.bytes_per_block


def test_layout_permutes_block_kv_head_token_content():
    assert physical_shape(SPEC, KVLayout(order=(1, 0, 2, 3, 4)), 5) == (2, 5, 3, 4, 8)
    assert physical_shape(SPEC, KVLayout(order=(0, 1, 2, 3, 4)), 5) == (5, 2, 3, 4, 8)
    wide = replace(SPEC, v_head_dim=12)
    assert physical_shape(wide, KVLayout(), 5) == (5, 2, 4, 3, 12)
    latent = replace(SPEC, kind="mla", num_kv_heads=1, v_head_dim=0)
    assert physical_shape(latent, KVLayout(), 5) == (5, 1, 4, 1, 8)


@pytest.mark.parametrize("order", [(0, 1, 3, 2, 4), (1, 2, 0, 3, 4), (4, 3, 2, 1, 0)])
def test_copies_blocks_of_every_layer(order):
    memory = device().memory
    pool = memory.kv_pool(GROUP, KVLayout(order=order), 6)
    fill(pool)
    before = pool.logical().clone()
    # A block that is source and target at once is read before anything is written.
    pairs = torch.tensor([[1, 4], [4, 2], [1, 5]])
    assert memory.copy_blocks(pool, pool, pairs) is None
    want = before.clone()
    for source, target in pairs.tolist():
        want[:, target] = before[:, source]
    assert torch.equal(pool.logical(), want)
    memory.copy_blocks(pool, pool, torch.empty((0, 2), dtype=torch.int64))
    assert torch.equal(pool.logical(), want)


def test_copies_between_pools_of_other_layouts_and_devices():
    one, other = device().memory, device().memory
    source = one.kv_pool(GROUP, KVLayout(), 4)
    target = other.kv_pool(GROUP, KVLayout(order=(2, 0, 1, 3, 4)), 7)
    fill(source)
    one.copy_blocks(source, target, torch.tensor([[3, 6], [1, 2]]))
    assert torch.equal(target.logical()[:, 6], source.logical()[:, 3])
    assert torch.equal(target.logical()[:, 2], source.logical()[:, 1])
    assert target.logical()[:, [0, 1, 3, 4, 5]].count_nonzero() == 0
    smaller = other.kv_pool(KVCacheGroup((0,), SPEC), KVLayout(), 4)
    with pytest.raises(UnsupportedError, match="equal layers"):
        one.copy_blocks(source, smaller, torch.tensor([[1, 1]]))


def test_too_large_a_pool_states_needed_and_available():
    with pytest.raises(OutOfMemoryError) as error:
        device(free=1 << 20).memory.kv_pool(GROUP, KVLayout(), 10_000)
    needed = 10_000 * GROUP.bytes_per_block / 2**20
    assert f"needs {needed:.1f} MiB, 1.0 MiB are available" in str(error.value)
    assert "cache.num_blocks" in str(error.value)
    with pytest.raises(OutOfMemoryError):
        device(free=1 << 62).memory.kv_pool(GROUP, KVLayout(), 1 << 45)


def test_pools_that_this_device_does_not_keep():
    memory = device().memory
    with pytest.raises(UnsupportedError, match="opaque"):
        memory.kv_pool(GROUP, KVLayout(opaque=True), 2)
    with pytest.raises(UnsupportedError, match="recurrent"):
        memory.kv_pool(KVCacheGroup((0,), replace(SPEC, kind="recurrent")), KVLayout(), 2)


def test_accounting_by_region_and_zero_after_close():
    opened = device()
    memory = opened.memory
    assert memory.stats().by_tag == {}
    pool = memory.kv_pool(GROUP, KVLayout(), 2)
    with memory.region("weights"):
        weights = torch.ones(16 << 20)
        with memory.region("draft"):
            memory.kv_pool(GROUP, KVLayout(), 3)
    by_tag = memory.stats().by_tag
    assert by_tag["kv"] == 2 * GROUP.bytes_per_block
    assert 3 * GROUP.bytes_per_block <= by_tag["draft"] < weights.nbytes
    assert by_tag["weights"] >= weights.nbytes // 2
    with memory.region("outer"), memory.region("inner"):
        more = torch.ones(16 << 20)
    assert memory.stats().by_tag["inner"] >= more.nbytes // 2 > memory.stats().by_tag["outer"]
    opened.close()
    opened.close()
    assert memory.stats().by_tag == {}
    assert pool.num_bytes == 0
    with pytest.raises(UnsupportedError, match="closed"):
        pool.view(0)


def test_region_ends_when_its_block_fails():
    memory = device().memory
    with pytest.raises(KeyError), memory.region("weights"):
        raise KeyError
    memory.kv_pool(GROUP, KVLayout(), 2)
    assert memory.stats().by_tag["kv"] == 2 * GROUP.bytes_per_block


def test_device_closes_its_communicators(tmp_path):
    opened = device()
    group = opened.communicator(GroupSpec(0, 1, f"file://{tmp_path}/meet"))
    assert group.all_reduce(torch.ones(3)).tolist() == [1.0, 1.0, 1.0]
    opened.close()
    with pytest.raises(ConfigError, match="closed"):
        group.all_reduce(torch.ones(3))


def test_backend_and_pool_fit_together():
    opened = device()
    layout = CpuAttention.layout(SPEC, INFO)
    pool = opened.memory.kv_pool(GROUP, layout, 3)
    CpuAttention(SPEC, layout, opened)
    assert pool.view(0).shape == (3, 2, 4, 3, 8)
    # The one that needs no compiler comes last.
    assert CpuPlatform().attention(INFO)[-1] is CpuAttention
