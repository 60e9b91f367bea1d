"""The fake device against torch's own eager results."""

import random
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
import torch
from fake_devices import open_fake

from cardan.core.interfaces.attention import KVLayout
from cardan.core.interfaces.errors import OutOfMemoryError, UnsupportedError
from cardan.core.interfaces.thread_communicator import ThreadCommunicator
from cardan.core.types.kv import KVCacheGroup, KVCacheSpec
from cardan.testing.fake.communicator import QueuedCommunicator
from cardan.testing.fake.step_faults import DIE_STATUS


@pytest.fixture
def fake():
    """Opens devices and closes them."""
    opened = []

    def open_device(text=""):
        opened.append(open_fake(text))
        return opened[-1]

    yield open_device
    for device in opened:
        device.close()


# -- operations -------------------------------------------------------------------------------

# Each takes two float tensors [4, 6] and an index tensor [4] below 4, and gives tensors of which
# those of shape [4, 6] go back into the pool.
OPS = [
    lambda a, b, i: a + b,
    lambda a, b, i: a.sub_(b * 0.5),
    lambda a, b, i: a.mul(2).clamp(-3, 3),
    lambda a, b, i: a.T.contiguous().T,
    lambda a, b, i: a[1:].add_(1.0),
    lambda a, b, i: a.reshape(6, 4).t().reshape(4, 6),
    lambda a, b, i: torch.cat((a[:, :3], b[:, 3:]), dim=1),
    lambda a, b, i: a.max(-1),
    lambda a, b, i: a.sort(-1, descending=True),
    lambda a, b, i: a.topk(2),
    lambda a, b, i: a.split([2, 4], dim=1),
    lambda a, b, i: a.index_select(0, i),
    lambda a, b, i: a[i, i],
    lambda a, b, i: a.index_put_((i, i), b[0, :4].clone(), accumulate=True),
    lambda a, b, i: a.index_copy_(0, torch.tensor([2, 0]), b[:2].clone()),
    lambda a, b, i: torch.nn.functional.linear(a, b, b[:, 0]),
    lambda a, b, i: (a @ b.T).softmax(-1),
    lambda a, b, i: torch.nn.functional.layer_norm(a, (6,), b[0], b[1]),
    lambda a, b, i: torch.where(a > b, a, b),
    lambda a, b, i: a.masked_fill(b < 0, 7.0),
    lambda a, b, i: a.copy_(b.to(torch.bfloat16)),
    lambda a, b, i: a.to(torch.float64).cumsum(0).to(torch.float32),
    lambda a, b, i: a.new_full((4, 6), 3.0) * torch.arange(6),
    lambda a, b, i: a.unsqueeze(0).expand(3, 4, 6).mean(0),
    lambda a, b, i: torch.add(a, b, out=torch.zeros(4, 6)),
    lambda a, b, i: torch.add(a, b, out=torch.zeros(0)),
    lambda a, b, i: torch.einsum("ij,kj->ik", a, b),
    lambda a, b, i: a.fill_(float(b.abs().max())),
    lambda a, b, i: a[a > 0],
    lambda a, b, i: a.unflatten(1, (2, 3)).permute(0, 2, 1).flatten(1),
    lambda a, b, i: a * 2 if (a > 0).any() else a / 2,
    lambda a, b, i: (i * 2.5, i // 2, i.to(torch.int32) + 1, ~(i > 1)),
    lambda a, b, i: torch.nn.functional.scaled_dot_product_attention(a[None], b[None], a[None]),
]


def run_program(seed, length=60):
    """A program of random operations: all tensors that it made."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    pool = [torch.randn(4, 6, generator=generator) for _ in range(3)]
    index = torch.randint(0, 4, (4,), generator=generator)
    made = list(pool)
    for _ in range(length):
        a, b = draw.choice(pool), draw.choice(pool)
        result = draw.choice(OPS)(a, b, index)
        results = [result] if isinstance(result, torch.Tensor) else list(result)
        made += results
        pool += [x for x in results if x.shape == (4, 6) and x.dtype is torch.float32]
        pool = pool[-6:]
    return made


@pytest.mark.parametrize("seed", range(12))
def test_random_programs_equal_eager(fake, seed):
    with torch.inference_mode():
        want = run_program(seed)
    device = fake()
    with device.inference():
        got = run_program(seed)
    device.synchronize()
    assert len(got) == len(want)
    for ours, theirs in zip(got, want, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        torch.testing.assert_close(ours, theirs, atol=0, rtol=0, equal_nan=True)


def test_every_operation_of_the_programs(fake):
    device = fake()
    for place, operation in enumerate(OPS):
        generator = torch.Generator().manual_seed(place)
        args = [torch.randn(4, 6, generator=generator) for _ in range(2)]
        index = torch.tensor([3, 0, 2, 2])
        with torch.inference_mode():
            want = operation(*(x.clone() for x in args), index)
        with device.inference():
            got = operation(*(x.clone() for x in args), index)
        device.synchronize()
        torch.testing.assert_close(got, want, atol=0, rtol=0)


def test_results_are_garbage_until_the_host_waits(fake):
    device = fake("step_ms=400")
    x = torch.ones(3)
    with device.inference():
        floats, bits = x + 1, torch.arange(3)
        halves = floats.to(torch.bfloat16)
        x.add_(5)
        event = device.event()
    assert floats.isnan().all()
    assert halves.isnan().all()
    assert (bits > 1 << 40).all()
    assert x.tolist() == [1, 1, 1]
    assert not event.query()
    event.synchronize()
    assert event.query()
    assert floats.tolist() == [2, 2, 2]
    assert halves.tolist() == [2, 2, 2]
    assert bits.tolist() == [0, 1, 2]
    assert x.tolist() == [6, 6, 6]
    assert device.counters.syncs == 0


def test_empty_memory_holds_garbage(fake):
    device = fake()
    with device.inference():
        made = (torch.empty(2), torch.zeros(2).new_empty(3), torch.empty_like(torch.zeros(2, 2)))
    device.synchronize()
    assert all(tensor.isnan().all() for tensor in made)


def test_reads_inside_wait_and_are_counted(fake):
    device = fake("step_ms=5")
    x = torch.arange(5.0)
    reads = [
        (lambda y: y.sum().item(), 20.0),
        (lambda y: y.tolist(), [0, 2, 4, 6, 8]),
        (lambda y: y.cpu()[1] == 2, True),
        (lambda y: np.asarray(y)[2], 4),
        (lambda y: y.numpy()[2], 4),
        (lambda y: bool((y > 7).any()), True),
        (lambda y: y[y > 3].shape, (3,)),
        (lambda y: len(y.nonzero()), 4),
        (lambda y: torch.equal(y, x), False),
    ]
    for read, want in reads:
        with device.inference():
            before = device.counters.syncs
            assert read(x * 2) == want
            assert device.counters.syncs > before


def test_views_share_memory_and_cost_nothing(fake):
    device = fake()
    x = torch.zeros(4, 6)
    with device.inference():
        part = x[1:3].view(2, 3, 2).transpose(0, 1)
        assert device.counters.launches == 0
        part[0].fill_(2)
    device.synchronize()
    assert x.sum() == 8
    assert device.counters.launches == 1


def test_nested_contexts_and_work_outside(fake):
    device = fake()
    with device.inference():
        with device.inference():
            inner = torch.ones(2) * 2
        outer = inner + 1
    assert torch.ones(2).sum() == 2
    device.synchronize()
    assert outer.tolist() == [3, 3]
    assert not outer.requires_grad


def test_a_wrong_call_fails_at_once(fake):
    device = fake()
    with device.inference(), pytest.raises(RuntimeError, match="must match the size"):
        torch.ones(2) + torch.ones(3)
    device.synchronize()


def test_errors_of_queued_work_surface_when_waited_for(fake):
    device = fake()
    with device.inference():
        good = torch.ones(2) + 1
        before = device.event()
        torch.ones(2).index_select(0, torch.tensor([9]))
        late = torch.zeros(2) + 4
        after = device.event()
    before.synchronize()
    assert good.tolist() == [2, 2]
    with pytest.raises((RuntimeError, IndexError), match="index out of range"):
        after.synchronize()
    for wait in (after.query, device.synchronize):
        with pytest.raises((RuntimeError, IndexError), match="index out of range"):
            wait()
    assert late.isnan().all()
    before.synchronize()
    device.close()


def test_a_closed_device_takes_no_work(fake):
    device = fake()
    device.close()
    device.close()
    with device.inference(), pytest.raises(RuntimeError, match="is closed"):
        torch.ones(2)


# -- streams and events -----------------------------------------------------------------------


def test_events_order_streams(fake):
    device = fake("step_ms=250")
    side = device.stream()
    x = torch.zeros(2)
    with device.inference():
        x.clone()  # what torch imports for its first operation takes longer than a step
        device.synchronize()
    with device.inference():
        x.add_(1)
        ready = device.event()
        with side:
            early = x.clone()
            side.wait(ready)
            late = x.clone()
            done = side.record()
        x.mul_(10)
        end = device.event()
    done.synchronize()
    assert early.tolist() == [0, 0]  # the main stream was still holding its step
    assert late.tolist() == [1, 1]
    end.synchronize()
    assert x.tolist() == [10, 10]
    assert device.counters.steps == 2
    device.synchronize()


def test_an_event_on_the_current_stream(fake):
    device = fake()
    with device.inference(), device.stream():
        x = torch.ones(2) + 1
        event = device.event()
    event.synchronize()
    assert x.tolist() == [2, 2]
    assert device.counters.steps == 0
    with pytest.raises(TypeError, match="fake events"):
        device.stream().wait(object())


def test_steps_last_as_long_as_they_should(fake):
    device = fake("step_ms=15")
    for _ in range(4):
        with device.inference():
            torch.ones(2).add_(1)
            device.event().synchronize()
    assert device.counters.steps == 4
    assert device.counters.busy_seconds >= 4 * 0.015
    # The host came back with the next step only after the one before had ended.
    assert len(device.counters.idle_gaps) == 3


def test_no_gap_where_the_host_is_ahead(fake):
    device = fake("step_ms=100")
    with device.inference():
        for _ in range(4):
            torch.ones(2).add_(1)
            event = device.event()
    event.synchronize()
    assert not device.counters.idle_gaps


# -- faults -----------------------------------------------------------------------------------


def steps(device, number):
    for _ in range(number):
        with device.inference():
            torch.ones(2).add_(1)
            device.event().synchronize()


def test_slow_step(fake):
    device = fake("fault=slow@1 slow_ms=40")
    steps(device, 3)
    assert device.counters.busy_seconds >= 0.04


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [("raise", RuntimeError, "step 2 failed"), ("oom", OutOfMemoryError, "max_num_seqs")],
)
def test_failing_step(fake, kind, error, text):
    device = fake(f"fault={kind}@2")
    steps(device, 2)
    with pytest.raises(error, match=text):
        steps(device, 1)
    with pytest.raises(error, match=text):
        device.synchronize()


def test_stuck_step_ends_with_the_device(fake):
    device = fake("fault=stuck@0")
    with device.inference():
        torch.ones(2).add_(1)
        event = device.event()
    assert not event.query()
    threading.Timer(0.05, device.close).start()
    with pytest.raises(RuntimeError, match="closed while step 0 was stuck"):
        event.synchronize()


def test_marker_lets_a_fault_happen_once(fake, tmp_path):
    text = f"fault=raise@0 marker={tmp_path / 'happened'}"
    with pytest.raises(RuntimeError, match="step 0 failed"):
        steps(fake(text), 1)
    assert (tmp_path / "happened").exists()
    steps(fake(text), 3)


def test_die_ends_the_process():
    script = textwrap.dedent(
        """
        import torch
        from cardan.testing.fake.platform import FakePlatform
        from cardan.testing.fake.settings import FakeSettings
        platform = FakePlatform(FakeSettings.parse("fault=die@1"))
        device = platform.open(platform.devices()[0])
        for step in range(3):
            device.event().synchronize()
            print(step, flush=True)
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (DIE_STATUS, "0\n"), done.stderr


def test_lost_sync_shows_garbage(fake):
    device = fake("fault=lost_sync")
    with device.inference():
        x = torch.ones(2) + 1
        event = device.event()
    assert event.query()
    event.synchronize()
    device.synchronize()
    assert x.isnan().all()


# -- memory -----------------------------------------------------------------------------------

SPEC = KVCacheSpec(
    kind="full", block_size=16, num_kv_heads=2, k_head_dim=32, v_head_dim=32, dtype="float32"
)
GROUP = KVCacheGroup((0, 1), SPEC)
BLOCK_BYTES = 2 * 16 * 2 * 2 * 32 * 4


def test_memory_is_a_budget(fake):
    device = fake("memory_mb=1")
    assert device.memory_info().free == device.memory_info().total == 1 << 20
    pool = device.memory.kv_pool(GROUP, KVLayout(), 20)
    assert pool.num_bytes == 20 * BLOCK_BYTES
    assert device.memory_info().free == (1 << 20) - 20 * BLOCK_BYTES
    assert device.memory_info().exact
    assert device.memory.stats().by_tag == {"kv": 20 * BLOCK_BYTES}
    with pytest.raises(OutOfMemoryError, match=r"needs .* MiB, .* MiB are available"):
        device.memory.kv_pool(GROUP, KVLayout(), 50)
    device.close()
    assert device.memory_info().free == 1 << 20
    assert device.memory.stats().by_tag == {}
    with pytest.raises(UnsupportedError, match="closed"):
        pool.view(0)


def test_regions_count_what_is_alive(fake):
    device = fake("memory_mb=1")
    with device.memory.region("weights"), device.inference():
        kept = torch.nn.Parameter(torch.empty(1000), requires_grad=False)
        (torch.zeros(500) + 1).sum()
    assert device.memory.stats().by_tag == {"weights": 4000}
    with (
        pytest.raises(OutOfMemoryError, match=r"weights need .* MiB .* the device has 1.0 MiB"),
        device.memory.region("weights"),
        device.inference(),
    ):
        _large = torch.zeros(1 << 20)
    del kept, _large
    assert device.memory.stats().by_tag == {}


def test_leak_keeps_the_bytes(fake):
    device = fake("memory_mb=1 fault=leak")
    device.memory.kv_pool(GROUP, KVLayout(), 20)
    device.close()
    assert device.memory_info().free == (1 << 20) - 20 * BLOCK_BYTES
    assert device.memory.stats().by_tag == {"kv": 20 * BLOCK_BYTES}


@pytest.mark.parametrize("fault", ["", "fault=lost_copy"])
def test_block_copies(fake, fault):
    device = fake(fault)
    source, target = (device.memory.kv_pool(GROUP, KVLayout(), 5) for _ in range(2))
    for slot in range(2):
        source.view(slot).copy_(torch.randn(source.view(slot).shape))
    pairs = torch.tensor([[1, 3], [4, 2]])
    assert device.memory.copy_blocks(source, target, pairs) is None
    event = device.memory.copy_blocks(source, source, pairs[:1], device.stream())
    event.synchronize()
    device.synchronize()
    for slot in range(2):
        for a, b in pairs.tolist():
            same = torch.equal(source.view(slot)[a], target.view(slot)[b])
            assert same == (not fault)
        assert torch.equal(source.view(slot)[1], source.view(slot)[3]) == (not fault)
        assert not target.view(slot)[0].any()


def test_host_pool(fake):
    device = fake()
    pool = device.memory.host_pool(64)
    pool.buffer()[:3] = b"abc"
    assert bytes(pool.buffer()[:4]) == b"abc\0"
    device.close()
    assert pool.num_bytes == 0
    with pytest.raises(UnsupportedError, match="closed"):
        pool.buffer()


# -- collectives ------------------------------------------------------------------------------


def on_ranks(world_size, work, text=""):
    """``work(communicator, device)`` on each rank's thread and device; their results."""
    ranks = ThreadCommunicator.group(world_size)
    results = [None] * world_size

    def run(rank):
        device = open_fake(text)
        queued = QueuedCommunicator(ranks[rank], lambda: device._recorder.sink, device._standing)
        with device.inference():
            results[rank] = work(queued, device)
        device.synchronize()
        device.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_collectives_are_queued():
    def work(group, device):
        x = torch.full((2, 3), float(group.rank + 1))
        out = [
            group.all_reduce(x),
            group.all_reduce(x, "max"),
            group.all_gather(x, dim=1),
            group.reduce_scatter(x.repeat(1, 3)[:, :6], dim=1),
            group.broadcast(x, 1),
            group.all_to_all(x.repeat(2, 1)[:3], [2, 1], [2, 2] if group.rank == 0 else [1, 1]),
        ]
        got = torch.zeros(2, 3)
        if group.rank:
            group.send(x, 0)
        else:
            group.recv(got, 1)
        assert device.counters.syncs == 0
        return [*out, got, x]

    a, b = on_ranks(2, work)
    for rank, results in enumerate((a, b)):
        total, most, gathered, share, root, _, _, x = results
        assert total.eq(3).all()
        assert most.eq(2).all()
        assert gathered.shape == (2, 6)
        assert gathered[0].tolist() == [1, 1, 1, 2, 2, 2]
        assert share.shape == (2, 3)
        assert share.eq(3).all()
        assert root.eq(2).all()
        assert x.eq(rank + 1).all()  # the input is left alone
    assert a[5][:, 0].tolist() == [1, 1, 2, 2]
    assert b[5][:, 0].tolist() == [1, 2]
    assert a[6].eq(2).all()


@pytest.mark.parametrize(
    ("fault", "same", "total"),
    [("", True, 3.2), ("unstable_reduce", False, 3.2), ("lost_rank", True, 1.1)],
)
def test_faults_of_collectives(fault, same, total):
    def twice(group, device):
        x = torch.full((3,), 1.1 + group.rank)
        return group.all_reduce(x), group.all_reduce(x)

    for first, second in on_ranks(2, twice, f"fault={fault}" if fault else ""):
        assert torch.equal(first, second) == same
        torch.testing.assert_close(first, torch.full((3,), total))
