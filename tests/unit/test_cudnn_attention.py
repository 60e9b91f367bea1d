"""Which steps are cuDNN's, and that they are called as they must be. Torch's own product stands in
for cuDNN, Triton's kernels run in its interpreter."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from triton_interpreter import interpreted, interpreting

from cardan.core.interfaces.attention import LayerParams
from cardan.core.interfaces.capabilities import Capabilities, DeviceInfo
from cardan.core.interfaces.torch_device import TorchDevice
from cardan.testing.conformance.paged_batches import Geometry, PagedBatch, Placement

INFO = DeviceInfo(platform="test", index=0, name="test", arch="sm_90")
PLAIN = Geometry(heads=4, kv_heads=2, k_dim=16, v_dim=16, block_size=16, dtype="float16")


@pytest.fixture
def module(monkeypatch):
    """With lengths that are multiples of 64, and a record of what cuDNN was asked."""
    interpreted("attention")
    from cardan.platforms.cuda import cudnn_attention

    asked = []

    def attend(q, k, v, **named):
        asked.append((q.shape, k.shape, named))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, **named)

    monkeypatch.setattr(cudnn_attention, "_ROUND", 64)
    monkeypatch.setattr(cudnn_attention, "_BACKEND", torch.nn.attention.SDPBackend.MATH)
    monkeypatch.setattr(cudnn_attention, "_serves", lambda *by_rows: True)
    monkeypatch.setattr(cudnn_attention, "scaled_dot_product_attention", attend)
    cudnn_attention.asked = asked
    return cudnn_attention


def check(module, rows, layer, **placement):
    backend_class = module.CudnnAttention
    layout = backend_class.layout(PLAIN.spec, INFO)
    capabilities = Capabilities(instruction_sets=("tile_copies",))
    device = TorchDevice(INFO, capabilities, "cpu", lambda: None)
    batch = PagedBatch(PLAIN, rows, 3, Placement(layout=layout, **placement))
    with interpreting():
        out = batch.run(backend_class(PLAIN.spec, layout, device), layer)
    want, _ = batch.truth(layer)
    np.testing.assert_allclose(out.double().numpy(), want, atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize("rows", [[(64, 64)], [(64, 64), (64, 64)], [(128, 128)]], ids=str)
def test_prompts_of_one_round_length(module, rows):
    check(module, rows, LayerParams(scale=0.2))
    ((q_shape, k_shape, named),) = module.asked
    assert q_shape == (len(rows), 4, rows[0][0], 16)
    assert k_shape == (len(rows), 2, rows[0][0], 16)
    assert named == {"is_causal": True, "scale": 0.2, "enable_gqa": True}


@pytest.mark.parametrize(
    ("rows", "layer", "padding"),
    [
        ([(65, 65)], {}, 0),
        ([(64, 64)], {}, 1),
        ([(64, 70)], {}, 0),
        ([(64, 64), (1, 5)], {}, 0),
        ([(64, 64)], {"softcap": 2.0}, 0),
    ],
    ids=str,
)
def test_all_else_is_triton_s(module, rows, layer, padding):
    check(module, rows, LayerParams(scale=0.2, **layer), padding=padding)
    assert not module.asked


def test_what_cudnn_refuses_is_triton_s(module, monkeypatch):
    monkeypatch.setattr(module, "_serves", lambda *by_rows: False)
    check(module, [(64, 64)], LayerParams(scale=0.2))
    assert not module.asked


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "float32"}, "computes no float32"),
        ({"k_head_dim": 20}, "no multiples of 8"),
        ({"v_head_dim": 256}, "not longer than 128"),
        ({"tree_mask": True}, "no tree masks"),
    ],
)
def test_refusals(module, changes, reason):
    verdict = module.CudnnAttention.accepts(replace(PLAIN.need, **changes), INFO)
    assert reason in " ".join(verdict.reasons)
    assert module.CudnnAttention.accepts(PLAIN.need, INFO)
