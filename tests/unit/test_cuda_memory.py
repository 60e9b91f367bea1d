"""Host pools and sleep of the platform for NVIDIA's GPUs, with a made-up runtime."""

import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from cardan.core.interfaces import torch_device
from cardan.core.interfaces.attention import KVLayout
from cardan.core.interfaces.errors import ConfigError, OutOfMemoryError, UnsupportedError
from cardan.core.interfaces.memory import MemoryInfo
from cardan.core.types.kv import KVCacheGroup, KVCacheSpec
from cardan.core.types.sampling_params import SamplingParams
from cardan.llm import LLM
from cardan.platforms.cpu.platform import CpuPlatform
from cardan.platforms.shared.gpu import memory
from cardan.platforms.shared.gpu.host_pool import GpuHostPool
from cardan.platforms.shared.gpu.memory import GpuMemoryAllocator
from cardan.platforms.shared.gpu.streams import GpuStream
from cardan.testing.tiny_models import make_tiny_model, prompt_ids

HOST = torch.device("cpu")
SPEC = KVCacheSpec("full", 4, 2, 8, 8, "float32")


class Runtime:
    """Locks memory, up to ``most`` bytes."""

    def __init__(self, most=1 << 30):
        self.most = most
        self.locked = {}

    def cudaHostRegister(self, address, num_bytes, flags):
        if num_bytes > self.most:
            return 2
        self.locked[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address):
        del self.locked[address]
        return 0


@pytest.fixture
def runtime(monkeypatch):
    made = Runtime()
    monkeypatch.setattr("torch.cuda.cudart", lambda: made)
    monkeypatch.setattr("torch.cuda.device", lambda device: nullcontext())
    monkeypatch.setattr("torch.cuda.stream", lambda stream: nullcontext())
    monkeypatch.setattr("torch.cuda.synchronize", lambda device=None: None)
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)
    return made


def test_locked_memory_has_its_exact_size_and_is_given_back(runtime):
    pool = GpuHostPool(70_000, True, HOST)
    assert list(runtime.locked.values()) == [70_000]
    view = pool.buffer()
    view[:] = b"\7" * 70_000
    assert bytes(pool.tensor()[-3:].tolist()) == b"\7\7\7"
    pool.close()
    pool.close()
    assert not runtime.locked
    assert view[0] == 7  # views outlive the pool
    with pytest.raises(ValueError, match="was closed"):
        pool.buffer()


def test_memory_that_need_not_be_locked(runtime):
    assert len(GpuHostPool(5, False, HOST).buffer()) == 5
    assert len(GpuHostPool(0, True, HOST).buffer()) == 0
    assert not runtime.locked


def test_host_pools_that_are_refused_say_what_to_do(runtime):
    runtime.most = 100
    with pytest.raises(OutOfMemoryError, match=r"CUDA error 2 .*ulimit -l"):
        GpuHostPool(101, True, HOST)
    with pytest.raises(OutOfMemoryError, match="does not fit"):
        GpuHostPool(1 << 62, False, HOST)
    with pytest.raises(ConfigError, match="at least 0"):
        GpuHostPool(-1, True, HOST)


def test_taking_note_of_weights_imports_no_compiler():
    code = (
        "import sys, torch; from cardan.platforms.shared.gpu.sleep import StorageRecord as Record\n"
        "with Record(torch.device('cpu')): torch.ones(3)\n"
        "print([name for name in ('torch._dynamo', 'triton', 'sympy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# -- sleep ---------------------------------------------------------------------------------------


@pytest.fixture
def allocator(runtime, monkeypatch):
    """Of the host's memory, which plays the device's."""
    monkeypatch.setattr(
        torch_device, "_zeros", lambda shape, dtype, device: torch.zeros(shape, dtype=dtype)
    )
    monkeypatch.setattr(memory, "memory_info", lambda device: MemoryInfo(1 << 30, 1 << 30))
    return GpuMemoryAllocator(HOST, SimpleNamespace(synchronize=lambda: None))


class Model:
    """Weights, one of which is shown by two parts of it, and what was used on the way."""

    def __init__(self, allocator):
        with allocator.region("weights"), torch.inference_mode():
            wide = torch.arange(24.0).view(4, 6)
            self.parts = (wide[:, :2], wide[:, 2:])
            self.bias = torch.ones(3) * 2
        self.other = torch.ones(5)


def held(tensor):
    return tensor.untyped_storage().nbytes()


def test_weights_come_back_and_caches_are_lost(allocator, runtime):
    model = Model(allocator)
    pool = allocator.kv_pool(KVCacheGroup((0, 1), SPEC), KVLayout(), 3)
    view = pool.view(1)
    view.fill_(5.0)
    allocator.sleep(1, ("weights", "kv"))
    assert [held(x) for x in (*model.parts, model.bias, view, model.other)] == [0, 0, 0, 0, 20]
    assert allocator.stats().by_tag["kv"] == 0
    assert list(runtime.locked.values()) == [4 * 6 * 4 + 3 * 4]
    report = allocator.wake()
    assert report.lost == {"kv", "graphs"}
    assert torch.equal(torch.cat(model.parts, 1), torch.arange(24.0).view(4, 6))
    assert model.bias.tolist() == [2.0] * 3
    assert view.abs().sum() == 0.0
    assert not runtime.locked
    view.fill_(1.0)
    assert pool.view(1).sum() == view.numel()


def test_weights_that_are_dropped_are_lost(allocator, runtime):
    model = Model(allocator)
    allocator.sleep(2, ("weights",))
    assert held(model.bias) == 0
    assert not runtime.locked
    assert allocator.wake().lost == {"weights", "graphs"}
    assert model.bias.tolist() == [0.0] * 3


def test_one_tag_alone(allocator, runtime):
    model = Model(allocator)
    view = allocator.kv_pool(KVCacheGroup((0,), SPEC), KVLayout(), 3).view(0)
    allocator.sleep(1, ("kv",))
    assert (held(view), held(model.bias)) == (0, 12)
    allocator.wake()
    allocator.sleep(1, ("weights",))
    assert held(view) > 0
    assert held(model.bias) == 0
    assert runtime.locked
    allocator.close()
    assert not runtime.locked
    with pytest.raises(UnsupportedError, match="does not sleep"):
        allocator.wake()


def test_tags_wake_one_after_the_other(allocator, runtime):
    model = Model(allocator)
    view = allocator.kv_pool(KVCacheGroup((0,), SPEC), KVLayout(), 3).view(0)
    allocator.sleep(1, ("kv", "weights"))
    assert allocator.wake(("weights",)).lost == {"graphs"}
    assert not runtime.locked
    assert (held(view), model.bias.tolist()) == (0, [2.0] * 3)
    with pytest.raises(UnsupportedError, match=r"does not sleep with \('weights',\)"):
        allocator.wake(("weights",))
    with pytest.raises(UnsupportedError, match="sleeps already"):
        allocator.sleep(1, ("weights",))
    assert allocator.wake(("kv", "weights")).lost == {"kv", "graphs"}
    assert held(view) > 0
    with pytest.raises(UnsupportedError, match=r"does not sleep$"):
        allocator.wake()


def test_closed_host_pools_are_forgotten(allocator):
    pools = [allocator.host_pool(10) for _ in range(3)]
    for pool in pools:
        pool.close()
    last = allocator.host_pool(10)
    assert allocator._host_pools == [last]


def test_sleep_that_cannot_be(allocator, runtime):
    model = Model(allocator)
    with pytest.raises(UnsupportedError, match="levels are 1"):
        allocator.sleep(3, ("kv",))
    with pytest.raises(UnsupportedError, match="tags are weights and kv"):
        allocator.sleep(1, ("graphs",))
    with pytest.raises(UnsupportedError, match="does not sleep"):
        allocator.wake()
    runtime.most = 10
    with pytest.raises(OutOfMemoryError, match="ulimit"):
        allocator.sleep(1, ("weights",))
    assert model.bias.tolist() == [2.0] * 3
    allocator.sleep(2, ("weights",))
    with pytest.raises(UnsupportedError, match="sleeps already"):
        allocator.sleep(1, ("weights",))


def test_a_device_that_was_filled_meanwhile_wakes_later(allocator, monkeypatch):
    model = Model(allocator)
    allocator.sleep(1, ("weights",))
    resize = torch.UntypedStorage.resize_

    def refuse(storage, size):
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(torch.UntypedStorage, "resize_", refuse)
    with pytest.raises(OutOfMemoryError, match="wake it again"):
        allocator.wake()
    monkeypatch.setattr(torch.UntypedStorage, "resize_", resize)
    assert "weights" not in allocator.wake().lost
    assert model.bias.tolist() == [2.0] * 3


def test_weights_that_are_gone_are_not_kept(allocator, runtime):
    with allocator.region("weights"):
        torch.ones(1000) + 1
        rest = torch.ones(2)
    allocator.sleep(1, ("weights",))
    assert list(runtime.locked.values()) == [8]
    allocator.wake()
    assert rest.sum() == 2


def test_pairs_of_copies_may_be_on_the_host(allocator, monkeypatch):
    """A copy on a stream of its own waits for the device's current stream, not for the pairs'."""
    asked, waited = [], []

    class Side(GpuStream):
        def __init__(self):
            self.stream = None

        def __enter__(self):
            return self

        def __exit__(self, *exc):
            pass

        def wait(self, event):
            waited.append(event)

        def record(self):
            return "event"

    monkeypatch.setattr("torch.cuda.current_stream", lambda device: asked.append(device))
    monkeypatch.setattr(memory, "GpuEvent", lambda stream: "before")
    pool = allocator.kv_pool(KVCacheGroup((0,), SPEC), KVLayout(), 3)
    pool.view(0)[1] = 4.0
    assert allocator.copy_blocks(pool, pool, torch.tensor([[1, 2]]), Side()) == "event"
    assert (asked, waited) == ([HOST], ["before"])
    assert pool.view(0)[2].unique().tolist() == [4.0]


@pytest.mark.parametrize("level", [1, 2])
def test_a_whole_engine_sleeps_on_storages(allocator, monkeypatch, tmp_path, level):
    """Plain torch computes on what moves meanwhile: weights, tables of positions, caches."""
    monkeypatch.setattr(torch_device, "TorchMemoryAllocator", lambda *_of: allocator)
    for name in ("kernels", "attention"):
        monkeypatch.setattr(CpuPlatform, name, lambda self, device: ())
    make_tiny_model("qwen3", tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    settings = {"num_blocks": 16, "max_num_seqs": 2, "dtype": "float32", "load_format": "dummy"}
    with LLM(str(tmp_path), platform="cpu", **settings) as llm:

        def answers():
            found = llm.generate([prompt_ids(9), prompt_ids(33)], params, use_tqdm=False)
            return [output.outputs[0].token_ids for output in found]

        before = answers()
        weights = allocator._weights.storages()
        num_bytes = sum(storage.nbytes() for storage in weights)
        assert num_bytes > 4 * 100_000
        if level == 2:
            weights.clear()
        for _ in range(2):
            llm.sleep(level)
            left = allocator._weights.storages()
            assert sum(storage.nbytes() for storage in left) == 0
            assert len(left) == len(weights)
            llm.wake_up()
            assert sum(storage.nbytes() for storage in allocator._weights.storages()) == num_bytes
            assert answers() == before
