"""The CPU backend against the per-sequence float64 oracle, and its refusals."""

from dataclasses import replace

import pytest
import torch

from cardan.core.interfaces.attention import KVLayout, LayerParams
from cardan.core.interfaces.capabilities import DeviceInfo
from cardan.core.interfaces.errors import UnsupportedError
from cardan.platforms.cpu.attention import CpuAttention
from cardan.testing.conformance.attention_truth import error_text
from cardan.testing.conformance.paged_batches import Geometry, PagedBatch, Placement

DEVICE = DeviceInfo(platform="cpu", index=0, name="test", arch="test")
TOLERANCE = {"float32": 2e-6, "bfloat16": 3e-2, "float16": 3e-3}
MIXED = [(1, 1), (1, 9), (5, 5), (3, 17), (1, 33), (8, 8), (13, 40), (1, 12), (2, 2)]
EVEN_DECODE = [(1, 11)] * 5


def build(backend, geometry):
    """Planning and running need no open device."""
    return backend(geometry.spec, KVLayout(), None)


def check(batch, backend, layer, tolerance):
    with torch.inference_mode():
        out = batch.run(backend, layer)
    assert out.dtype == batch.geometry.torch_dtype
    assert not error_text(out, batch.truth(layer)[0], tolerance)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("rows", [MIXED, EVEN_DECODE], ids=["mixed", "decode"])
@pytest.mark.parametrize("window", [None, 1, 6])
def test_agrees_with_oracle(dtype, rows, window):
    geometry = Geometry(dtype=dtype)
    batch = PagedBatch(geometry, rows, 1, Placement(padding=2))
    layer = LayerParams(scale=0.25, window=window)
    check(batch, build(CpuAttention, geometry), layer, TOLERANCE[dtype])


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "float16", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_caches_in_other_dtypes(dtype, kv_dtype):
    geometry = Geometry(dtype=dtype, kv_dtype=kv_dtype)
    assert CpuAttention.accepts(geometry.need, DEVICE)
    batch = PagedBatch(geometry, MIXED, 1, Placement(padding=2))
    check(batch, build(CpuAttention, geometry), LayerParams(scale=0.25), TOLERANCE[dtype])


@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (4, 1)])
@pytest.mark.parametrize("dims", [(16, 16), (16, 8), (8, 24)])
def test_heads_and_dims(heads, dims):
    geometry = Geometry(heads=heads[0], kv_heads=heads[1], k_dim=dims[0], v_dim=dims[1])
    batch = PagedBatch(geometry, MIXED, 2)
    layer = LayerParams(scale=0.3)
    check(batch, build(CpuAttention, geometry), layer, 2e-6)


def test_chunk_boundaries(monkeypatch):
    monkeypatch.setattr(CpuAttention, "max_chunk_bytes", 30_000)
    geometry = Geometry()
    batch = PagedBatch(geometry, MIXED * 2, 3)
    layer = LayerParams(scale=0.25)
    backend = build(CpuAttention, geometry)
    assert len(backend.plan(batch.batch).pieces.ends) > 5
    check(batch, backend, layer, 2e-6)


@pytest.mark.parametrize("field", ["softcap", "sinks", "alibi", "lse"])
def test_refuses_what_the_fused_kernel_lacks(field):
    need = Geometry().need
    assert CpuAttention.accepts(replace(need, windows=frozenset({8})), DEVICE)
    verdict = CpuAttention.accepts(replace(need, **{field: True}), DEVICE)
    assert not verdict
    assert "no place for" in verdict.reasons[0]


def test_a_refused_layer_is_an_error():
    geometry = Geometry()
    batch = PagedBatch(geometry, [(1, 3)])
    with pytest.raises(UnsupportedError, match="refused"):
        batch.run(build(CpuAttention, geometry), LayerParams(scale=1.0, softcap=3.0))
