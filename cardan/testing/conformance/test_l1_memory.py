"""L1: KV pools, block copies, accounting, host pools, sleep."""

import pytest
import torch

from cardan.core.interfaces.attention import KVLayout
from cardan.core.interfaces.capabilities import Capabilities, DeviceInfo
from cardan.core.interfaces.device import Device
from cardan.core.interfaces.errors import OutOfMemoryError, UnsupportedError
from cardan.core.interfaces.memory import MemoryAllocator
from cardan.core.interfaces.platform import Platform
from cardan.core.types.kv import KVCacheGroup, KVCacheSpec
from cardan.testing.conformance.device_bench import SPEC, DeviceBench
from cardan.testing.conformance.results import not_supported

LEVEL = "L1"

_LATENT = KVCacheSpec(
    kind="mla", block_size=4, num_kv_heads=1, k_head_dim=24, v_head_dim=0, dtype="float32"
)
_UNEVEN = KVCacheSpec(
    kind="full", block_size=16, num_kv_heads=2, k_head_dim=8, v_head_dim=4, dtype="float32"
)
_ORDERS = [
    (0, 1, 2, 3, 4),
    (0, 1, 3, 2, 4),
    (1, 0, 3, 2, 4),
    (1, 0, 2, 3, 4),
    (0, 2, 1, 3, 4),
    (2, 0, 1, 4, 3),
]


@pytest.fixture
def bench(cardan_own_device: Device) -> DeviceBench:
    """A device of the test's own."""
    return DeviceBench(cardan_own_device)


def test_memory_info_is_bounded(cardan_own_device: Device) -> None:
    """Free bytes lie between 0 and the total, before and after an allocation."""
    before = cardan_own_device.memory_info()
    assert 0 <= before.free <= before.total, before
    assert before.total > 0, before
    bench = DeviceBench(cardan_own_device)
    pool = bench.pool(num_blocks=1 + (8 << 20) // (2 * SPEC.bytes_per_block))
    bench.fill(bench.pool(), 0.0)
    cardan_own_device.synchronize()
    after = cardan_own_device.memory_info()
    assert 0 <= after.free <= after.total, after
    assert after.total == before.total, f"the total changes: {before}, {after}"
    if before.exact and pool.num_bytes:
        fell = before.free - after.free
        assert fell >= pool.num_bytes // 2, (
            f"a pool of {pool.num_bytes} bytes made only {fell} bytes less free"
        )


@pytest.mark.parametrize("spec", [SPEC, _LATENT, _UNEVEN], ids=["equal", "latent", "uneven"])
@pytest.mark.parametrize("order", _ORDERS, ids=lambda order: "".join(map(str, order)))
def test_pool_shape(bench: DeviceBench, spec: KVCacheSpec, order: tuple[int, ...]) -> None:
    """A pool is zeroed, and each layer has the layout's shape, dtype and device."""
    num_blocks = 5
    layout = KVLayout(order=order)  # type: ignore[arg-type]
    pool = bench.pool(spec, num_blocks, 3, layout=None if layout == KVLayout() else layout)
    logical = (
        num_blocks,
        2 if spec.v_head_dim else 1,
        spec.num_kv_heads,
        spec.block_size,
        max(spec.k_head_dim, spec.v_head_dim),
    )
    assert pool.num_blocks == num_blocks
    assert pool.group.layers == (0, 1, 2)
    assert pool.layout == layout
    for layer in range(3):
        view = pool.view(layer)
        assert tuple(view.shape) == tuple(logical[axis] for axis in order)
        assert view.dtype == torch.float32
        assert view.device.type == bench.where.type
    assert pool.num_bytes >= num_blocks * pool.group.bytes_per_block
    assert bench.blocks(pool) == [[0.0] * num_blocks] * 3


def test_pool_dtypes(bench: DeviceBench, cardan_capabilities: Capabilities) -> None:
    """The cache can be kept in every dtype that the device declares for it."""
    for name in (*cardan_capabilities.dtypes, *cardan_capabilities.kv_dtypes):
        spec = KVCacheSpec("full", 4, 2, 8, 8, name) if name != "float64" else SPEC
        pool = bench.pool(spec)
        view = pool.view(0)
        assert view.element_size() == pool.group.spec.bytes_per_block // view[0].numel(), name


def test_backends_layouts(
    bench: DeviceBench, cardan_platform: Platform, cardan_device_info: DeviceInfo
) -> None:
    """The allocator makes pools in the layouts that the platform's own backends ask for."""
    backends = cardan_platform.attention(cardan_device_info)
    if not backends:
        not_supported("the platform has no attention backend of its own")
    for backend in backends:
        layout = backend.layout(SPEC, cardan_device_info)
        if layout.opaque:
            continue
        group = KVCacheGroup((0,), SPEC)
        pool = bench.device.memory.kv_pool(group, layout, 4)
        assert pool.layout == layout, f"{backend.name} asked for {layout}, got {pool.layout}"


def test_layers_and_pools_are_disjoint(bench: DeviceBench) -> None:
    """Writing one block of one layer of one pool changes nothing else."""
    first, second = bench.pool(num_layers=3), bench.pool(_UNEVEN)
    bench.fill(first, 1.0)
    bench.fill(second, 5000.0)
    axis = first.layout.order.index(0)
    with bench.device.inference():
        first.view(1).select(axis, 4).fill_(-7.0)
    want = [[1.0 + 100 * layer + block for block in range(8)] for layer in range(3)]
    want[1][4] = -7.0
    bench.check_blocks(first, want)
    other = [[5000.0 + 100 * layer + block for block in range(8)] for layer in range(2)]
    bench.check_blocks(second, other)


def test_too_large_a_pool(bench: DeviceBench) -> None:
    """A pool that cannot fit raises OutOfMemoryError; the device goes on, and holds no more."""
    device = bench.device
    kept = bench.pool()
    bench.fill(kept, 1.0)
    before = device.memory.stats().by_tag
    total = device.memory_info().total
    for factor in (2, 64):
        with pytest.raises(OutOfMemoryError) as raised:
            bench.pool(num_blocks=factor * total // SPEC.bytes_per_block)
        assert str(raised.value).strip(), "OutOfMemoryError without a text"
    assert device.memory.stats().by_tag == before, "a pool that failed is accounted"
    assert bench.blocks(kept)[0] == [1.0 + block for block in range(8)]
    another = bench.pool()
    bench.fill(another, 2.0)
    assert bench.blocks(another)[1][7] == 109.0


def test_copies_within_a_pool(bench: DeviceBench) -> None:
    """Blocks of all layers are copied; one source may go to several targets."""
    pool = bench.pool()
    bench.fill(pool, 0.0)
    bench.copy(pool, pool, (1, 5), (2, 6), (1, 7))
    want = [0.0, 1.0, 2.0, 3.0, 4.0, 1.0, 2.0, 1.0]
    bench.check_blocks(pool, [want, [100 + value for value in want]])


def test_copies_between_pools(bench: DeviceBench) -> None:
    """Two pools of one device exchange blocks, whatever their sizes."""
    source, target = bench.pool(num_blocks=8), bench.pool(num_blocks=3)
    bench.fill(source, 0.0)
    bench.fill(target, 1000.0)
    bench.copy(source, target, (7, 0), (4, 2))
    bench.check_blocks(target, [[7.0, 1001.0, 4.0], [107.0, 1101.0, 104.0]])
    bench.check_blocks(source, _filled())


def test_copies_are_ordered(bench: DeviceBench) -> None:
    """A copy sees what was written before it, not after it; copies follow each other."""
    pool = bench.pool()
    axis = pool.layout.order.index(0)
    bench.fill(pool, 0.0)
    with bench.device.inference():
        for layer in range(2):
            pool.view(layer).select(axis, 1).fill_(50.0)
    bench.copy(pool, pool, (1, 2))
    bench.copy(pool, pool, (2, 3))
    bench.copy(pool, pool, (3, 4))
    with bench.device.inference():
        for layer in range(2):
            pool.view(layer).select(axis, 1).fill_(60.0)
            pool.view(layer).select(axis, 3).fill_(70.0)
    want = _filled()
    for layer in range(2):
        want[layer][1:5] = [60.0, 50.0, 70.0, 50.0]
    bench.check_blocks(pool, want)


def test_copies_of_nothing(bench: DeviceBench) -> None:
    """An empty list of pairs is no error, and copies nothing."""
    pool = bench.pool()
    bench.fill(pool, 0.0)
    bench.copy(pool, pool)
    bench.check_blocks(pool, _filled())


def test_copies_on_a_stream(bench: DeviceBench, cardan_capabilities: Capabilities) -> None:
    """A copy on a stream of its own gives an event, after which it is done."""
    if not cardan_capabilities.streams:
        not_supported("streams is not declared")
    device, pool = bench.device, bench.pool()
    bench.fill(pool, 0.0)
    device.synchronize()
    with device.inference():
        event = device.memory.copy_blocks(pool, pool, bench.pairs((1, 6)), device.stream())
    assert event is not None, "copy_blocks on a stream returned no event"
    event.synchronize()
    want = _filled()
    want[0][6], want[1][6] = 1.0, 101.0
    bench.check_blocks(pool, want)


def test_regions(bench: DeviceBench) -> None:
    """What is allocated inside a region is accounted to its tag, also in nested regions."""
    memory = bench.device.memory
    with memory.region("weights"):
        outer = bench.pool()
        with memory.region("graphs"):
            inner = bench.pool()
    last = bench.pool()
    by_tag = memory.stats().by_tag
    assert by_tag.get("weights", 0) >= outer.num_bytes, by_tag
    assert by_tag.get("graphs", 0) >= inner.num_bytes, by_tag
    assert by_tag.get("kv", 0) >= last.num_bytes, f"a pool outside regions is no kv: {by_tag}"
    assert all(size >= 0 for size in by_tag.values()), by_tag


def test_host_pool(cardan_own_device: Device, cardan_capabilities: Capabilities) -> None:
    """Host memory for offload is writable, of the asked size, and closed for good."""
    pinned = cardan_capabilities.pinned_host_memory
    try:
        pool = cardan_own_device.memory.host_pool(1 << 16, pinned=pinned)
    except UnsupportedError as error:
        if pinned:
            raise
        not_supported(f"host pools: {error}")
    content = bytes(range(256)) * 256
    pool.buffer()[:] = content
    assert pool.num_bytes >= len(content)
    assert bytes(pool.buffer()[: len(content)]) == content
    pool.close()
    pool.close()


@pytest.mark.parametrize("level", [1, 2])
def test_sleep(bench: DeviceBench, cardan_capabilities: Capabilities, level: int) -> None:
    """A sleeping device frees memory and wakes with all that it does not report as lost."""
    memory = bench.device.memory
    if level not in cardan_capabilities.sleep_levels:
        _check_undeclared_sleep(memory, level)
        not_supported(f"sleep level {level} is not declared")
    pool = bench.pool()
    bench.fill(pool, 1.0)
    bench.device.synchronize()
    memory.sleep(level, ("kv",))
    report = memory.wake()
    assert report.lost <= {"weights", "kv", "graphs", "comm"}, report
    if "kv" not in report.lost:
        assert bench.blocks(pool)[1] == [101.0 + block for block in range(8)]
    bench.fill(pool, 9.0)
    assert bench.blocks(pool)[0][0] == 9.0
    memory.sleep(level, ("weights", "kv"))
    memory.wake(("weights",))
    assert "weights" not in memory.wake(("kv",)).lost
    bench.fill(pool, 9.0)
    assert bench.blocks(pool)[0][0] == 9.0


def _check_undeclared_sleep(memory: MemoryAllocator, level: int) -> None:
    """It is refused with a reason, or can be undone."""
    try:
        memory.sleep(level, ("kv",))
        memory.wake()
    except UnsupportedError as error:
        assert str(error).strip(), "sleep is refused without a reason"  # noqa: PT017


def _filled() -> list[list[float]]:
    """What a pool of two layers and eight blocks holds after ``fill(pool, 0.0)``."""
    return [[100.0 * layer + block for block in range(8)] for layer in range(2)]
