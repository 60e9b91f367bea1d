"""What is left for the caches of devices that tell their memory."""

import pytest

from cardan import LLM
from cardan.core.interfaces.errors import ConfigError
from cardan.core.interfaces.memory import MemoryInfo
from cardan.platforms.tpu.attention import XlaKernels
from cardan.platforms.tpu.device import TpuDevice
from cardan.platforms.tpu.executor import TpuExecutor
from cardan.testing.tiny_models import make_tiny_model

MIB = 1 << 20
SETTINGS = {
    "platform": "tpu",
    "dtype": "float32",
    "max_model_len": 128,
    "num_blocks": 16,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
}


@pytest.fixture
def told(tmp_path, monkeypatch):
    """Bytes for caches of an engine whose devices have ``free`` bytes each."""

    def bytes_of(name, ranks, free, **settings):
        make_tiny_model(name, tmp_path / name)
        with (
            LLM(tmp_path / name, **SETTINGS, **settings, tensor_parallel_size=ranks) as llm,
            monkeypatch.context() as patch,
        ):
            executor = llm._client._loop._engine._executor
            total = free * ranks
            patch.setattr(TpuDevice, "memory_info", lambda self: MemoryInfo(total, total))
            patch.setattr(TpuDevice, "is_host", False)
            patch.setattr(TpuExecutor, "_kernels", lambda self: XlaKernels())
            return executor.available_kv_bytes(0.5), executor._largest_step_bytes()

    return bytes_of


# Of two key heads each of two devices has one; four devices have both.
@pytest.mark.parametrize(("ranks", "shares"), [(1, 1), (2, 2), (4, 1)])
def test_each_device_keeps_room_for_a_step(ranks, shares, told):
    left, step = told("llama", ranks, 64 * MIB)
    assert left == shares * (32 * MIB - step)


def test_a_step_may_ask_for_all_log_probabilities(told):
    few, all_tokens = (told("llama", 1, 64 * MIB, max_logprobs=n)[1] for n in (20, -1))
    vocab_size, tables, numbers = 512, 4 + 32, 2
    assert all_tokens - few > 0.9 * 4 * numbers * tables * (vocab_size - 32)


def test_too_little_memory_is_told(told):
    with pytest.raises(ConfigError, match="no room for a KV cache"):
        told("llama", 1, 1000)
