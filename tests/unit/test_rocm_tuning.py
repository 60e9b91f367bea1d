"""Tiles of the Triton kernels for AMD's GPUs: their sizes, and numbers under the interpreter."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from triton_interpreter import interpreted, interpreting

from cardan.core.interfaces.capabilities import Capabilities, DeviceInfo
from cardan.core.interfaces.torch_device import TorchDevice
from cardan.core.ops.catalogue import CATALOGUE
from cardan.core.ops.compare import reference_kernel
from cardan.platforms.cpu.platform import CpuPlatform
from cardan.platforms.shared.triton.attention_tuning import HeadSizes, decode_tuning, ragged_tuning
from cardan.platforms.shared.triton.expert_tuning import ProductSizes, product_tuning
from cardan.platforms.shared.triton.targets import DeviceSizes, target_named
from cardan.testing.conformance.attention_bench import AttentionBench, LayerCase
from cardan.testing.conformance.paged_batches import Geometry, PagedBatch

ARCHS = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
LAYER = Geometry(heads=4, kv_heads=2, k_dim=32, v_dim=32, block_size=16)
OPS = {op.name: op for op in CATALOGUE}


def sizes_of(arch, num_cores=104):
    target = target_named(arch)
    shared = target.shared_bytes or 227 << 10
    return DeviceSizes(num_cores, shared, target.products, target.copies_directly)


def test_targets_by_the_names_of_tritons_driver():
    assert [target_named(arch).products for arch in ARCHS] == ["mfma"] * 3 + ["wmma"] * 2
    assert target_named(90).products == "mma"
    assert not target_named("sm_90").options
    # The compiler warns of it on gfx950, where it is without effect.
    assert "kpack" not in target_named("gfx950").options


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("head", [64, 128, 256])
@pytest.mark.parametrize("num_bytes", [1, 2, 4])
def test_attention_fits(arch, head, num_bytes):
    device, sizes = sizes_of(arch), HeadSizes(4, head, head, num_bytes)
    tunings = [decode_tuning(sizes, programs, device) for programs in (4, 64, 4096)]
    for tuning in (*tunings, ragged_tuning(sizes, device)):
        buffers = max(1, tuning.num_stages - device.spare_stages)
        rows = tuning.queries * tuning.packed if tuning.queries > 1 else 0
        needed = buffers * sizes.tile_bytes(tuning.tile) + rows * sizes.k_block * num_bytes
        assert needed <= device.shared_bytes
        assert tuning.tile >= 16
        assert tuning.num_warps * (64 if device.products == "mfma" else 32) <= 1024


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("tile", [16, 32, 64, 128])
def test_products_of_experts_fit(arch, tile):
    device = sizes_of(arch)
    for sizes in (ProductSizes(2048, 768, 2, 2), ProductSizes(768, 2048, 4, 1)):
        tuning = product_tuning(sizes, tile, device)
        stage = (tuning.width * sizes.projections + tile) * tuning.block * sizes.num_bytes
        assert tuning.num_stages == 2
        assert (2 - device.spare_stages) * stage < device.shared_bytes


@pytest.fixture(params=["gfx942", "gfx1201"])
def device(request, monkeypatch):
    """Of the interpreter, which stands for few cores of an architecture."""
    attention, experts = interpreted("attention"), interpreted("experts")
    made = sizes_of(request.param, num_cores=8)
    options = target_named(request.param).options
    for module in (attention, experts):
        monkeypatch.setattr(module, "product_options", lambda device: options)
    monkeypatch.setattr(attention, "device_sizes", lambda device: made)
    monkeypatch.setattr(experts, "_sizes", lambda device: made)
    info = DeviceInfo(platform="test", index=0, name="test", arch=request.param)
    return TorchDevice(info, Capabilities(), "cpu", lambda: None)


@pytest.mark.parametrize("changes", [{"k_dim": 128, "v_dim": 128}, {"kv_dtype": "int8"}])
def test_attention_is_right(device, changes):
    if device.info.arch == "gfx1201":
        changes = {**changes, "dtype": "float16"}
    backend = interpreted("attention").TritonAttention
    bench = AttentionBench(backend, CpuPlatform(), device, torch.device("cpu"))
    case = LayerCase(geometry=replace(LAYER, **changes))
    rows = [(1, 300), (20, 33)]
    batch = PagedBatch(case.geometry, rows, 5, bench.placement(case.geometry, order=2))
    layer = case.layer(bench.torch_device, np.random.default_rng(1))
    with interpreting():
        fault = bench.fault(batch, layer, case.lse)
    assert not fault, fault


def test_experts_are_right(device):
    """In tiles: more tokens than those that read weights for themselves."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(9, 32, generator=generator)
    experts = torch.randn(4, 3 * 32 * 24, generator=generator) * 0.2
    ids = torch.randint(0, 4, (9, 2), generator=generator, dtype=torch.int32)
    ids[:, 1] = (ids[:, 0] + 1) % 4
    weights = torch.rand(9, 2, generator=generator)
    with interpreting():
        found = interpreted("experts").expert_mlp(x, experts, ids, weights)
    define = reference_kernel(OPS["expert_mlp"], OPS)
    want = define(x.double(), experts.double(), ids, weights.double())
    torch.testing.assert_close(found.double(), want, atol=1e-4, rtol=1e-4)
