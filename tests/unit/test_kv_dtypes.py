"""Dtypes of caches: their names, who has them, and pools of them; rotation beside the write."""

import pytest
import torch
from model_helpers import build_context, build_model

from cardan.bootstrap.model_source import check_kv_dtype, normal_kv_dtype
from cardan.core.interfaces.attention import AttentionBackend, HeadRotation, KVLayout, LayerParams
from cardan.core.interfaces.capabilities import Capabilities, DeviceInfo
from cardan.core.interfaces.memory import MemoryInfo
from cardan.core.interfaces.model import LayerCache, StepContext
from cardan.core.interfaces.torch_device import TorchDevice
from cardan.core.interfaces.torch_kv_content import stored_content
from cardan.core.types.errors import ConfigError
from cardan.core.types.kv import KVCacheGroup, KVCacheSpec
from cardan.platforms.cpu.platform import CpuPlatform
from cardan.platforms.cuda.platform import CudaPlatform

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-4,
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("fp8", "float8_e4m3"), ("fp8_e4m3", "float8_e4m3"), ("fp8_e5m2", "float8_e5m2")],
)
def test_short_names_of_float8(name, dtype):
    assert normal_kv_dtype(name) == dtype


def test_what_a_platform_lacks_is_refused_with_what_it_has():
    host = CpuPlatform()
    info = host.devices()[0]
    dtypes = host.capabilities(info).kv_dtypes
    for dtype in ("auto", "float32", "bfloat16", "float16", "int8"):
        check_kv_dtype(dtype, dtypes, info.name)
    with pytest.raises(ConfigError) as caught:
        check_kv_dtype("float8_e4m3", dtypes, "a CPU")
    assert str(caught.value) == (
        "cache.kv_cache_dtype float8_e4m3 is not available on a CPU; "
        "choose one of auto, float32, bfloat16, float16, int8"
    )


@pytest.mark.parametrize(
    ("arch", "dtypes"),
    [("sm_80", ("int8",)), ("sm_89", ("int8", "float8_e4m3")), ("sm_100", ("int8", "float8_e4m3"))],
)
def test_float8_of_gpus(arch, dtypes):
    info = DeviceInfo(platform="cuda", index=0, name="a GPU", arch=arch)
    assert CudaPlatform().capabilities(info).kv_dtypes == dtypes
    if "float8_e4m3" in dtypes:
        check_kv_dtype("float8_e4m3", dtypes, info.name)


def float8_spec():
    return KVCacheSpec(
        kind="full", block_size=4, num_kv_heads=2, k_head_dim=8, v_head_dim=8, dtype="float8_e4m3"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_float8_holds_what_is_nearest(dtype):
    x = torch.tensor([0.0, 448, 449, 6e4, -torch.inf, torch.nan, 1.0625, 1.1875], dtype=dtype)
    found = stored_content(x, float8_spec(), torch.float8_e4m3fn).float()
    want = torch.tensor([0.0, 448, 448, 448, -448, torch.nan, 1.0, 1.25])
    torch.testing.assert_close(found, want, rtol=0, atol=0, equal_nan=True)


def test_pools_of_float8_are_allocated_and_copied():
    device = TorchDevice(
        DeviceInfo(platform="test", index=0, name="test", arch="test"),
        Capabilities(),
        "cpu",
        lambda: MemoryInfo(1 << 20, 1 << 20),
    )
    pool = device.memory.kv_pool(KVCacheGroup((0,), float8_spec()), KVLayout(), 4)
    cache = pool.view(0)
    assert cache.dtype == torch.float8_e4m3fn
    bits = cache.view(torch.uint8)
    bits[1] = torch.randint(0, 255, bits[1].shape, dtype=torch.uint8)
    device.memory.copy_blocks(pool, pool, torch.tensor([[1, 3]]))
    assert torch.equal(bits[3], bits[1])
    assert not bits[2].any()


class Recorder(AttentionBackend):
    """Takes down what a layer asks of it."""

    name = "recorder"
    accepts = layout = plan = None

    def __init__(self):
        self.written = []

    def write(self, k, v, cache, plan):
        self.written.append((k, v))

    def run(self, q, cache, plan, layer, lse=None):
        return q


@pytest.mark.parametrize(
    ("architecture", "op"),
    [("LlamaForCausalLM", "rotary_embedding"), ("Qwen3ForCausalLM", "qk_norm_rope")],
)
def test_layers_say_what_their_rotation_is(architecture, op):
    """A backend that fuses it finds the same inputs as the operation gets."""
    ops = build_context().ops
    model = build_model({"architectures": [architecture], **SIZES}, ops=ops)
    rotation = model.layers[0].self_attn.rotation.for_attention
    assert isinstance(rotation, HeadRotation)
    assert rotation.provider == "reference"
    q, k = torch.randn(3, 4, 8), torch.randn(3, 2, 8)
    positions = torch.tensor([0, 5, 9])
    weights = ()
    if op == "qk_norm_rope":
        for weight in (rotation.q_weight, rotation.k_weight):
            weight.copy_(torch.rand(8))
        weights = (rotation.q_weight, rotation.k_weight, rotation.eps)
        assert rotation.eps == 1e-4
    else:
        assert rotation.q_weight is None
        assert rotation.k_weight is None
    kernel = ops.bind(op, dtype="float32", head_dim=8, hidden=8)
    want_q, want_k = kernel(q, k, *weights, rotation.cos_sin, positions)
    backend, v = Recorder(), torch.randn(3, 2, 8)
    step = StepContext(positions, [LayerCache(backend, torch.empty(0), 0)], [None])
    out = step.attend(0, q, k, v, LayerParams(scale=1.0), rotation)
    assert torch.equal(out, want_q)
    ((written_k, written_v),) = backend.written
    assert torch.equal(written_k, want_k)
    assert written_v is v
    assert step.attend(0, q, k, v, LayerParams(scale=1.0)) is q
    assert backend.written[1][0] is k
