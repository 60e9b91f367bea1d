"""Triton's attention under the interpreter against the formula in float64."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from triton_interpreter import interpreted, interpreting

from cardan.core.interfaces.capabilities import Capabilities, DeviceInfo
from cardan.core.interfaces.torch_device import TorchDevice
from cardan.platforms.cpu.platform import CpuPlatform
from cardan.platforms.shared.triton.attention_tuning import (
    DeviceSizes,
    HeadSizes,
    decode_tuning,
    fresh_tuning,
    ragged_tuning,
)
from cardan.testing.conformance.attention_bench import AttentionBench, LayerCase
from cardan.testing.conformance.paged_batches import Geometry, PagedBatch

INFO = DeviceInfo(platform="test", index=0, name="test", arch="test")
PLAIN = Geometry(heads=4, kv_heads=2, k_dim=32, v_dim=32, block_size=16)
MIXED = [(1, 40), (5, 5), (1, 1), (20, 33), (3, 70)]
LONG = [(1, 600), (1, 3)]
FEATURES = {
    "plain": {},
    "window": {"window": 7},
    "soft cap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "alibi": {"alibi": True},
    "all": {"window": 9, "softcap": 2.0, "sinks": True, "alibi": True, "lse": True},
}


@pytest.fixture
def bench():
    """Of a device that copies tiles by itself, with few cores, so that long rows are split."""
    backend = interpreted("attention").TritonAttention
    capabilities = Capabilities(instruction_sets=("tile_copies",))
    device = TorchDevice(INFO, capabilities, "cpu", lambda: None)
    return AttentionBench(backend, CpuPlatform(), device, torch.device("cpu"))


def check(bench, case, rows, **placement):
    batch = PagedBatch(case.geometry, rows, 5, bench.placement(case.geometry, **placement))
    layer = case.layer(bench.torch_device, np.random.default_rng(1))
    with interpreting():
        fault = bench.fault(batch, layer, case.lse)
    assert not fault, fault


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_features(bench, features):
    case = replace(LayerCase(geometry=PLAIN), **features)
    for rows in (MIXED, LONG):
        check(bench, case, rows, order=2, padding=3, drop_before=case.window)


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "bfloat16"},
        {"dtype": "float16"},
        {"kv_dtype": "bfloat16"},
        {"heads": 2, "kv_heads": 2},
        {"heads": 6, "kv_heads": 2},
        {"heads": 5, "kv_heads": 1},
        {"k_dim": 80, "v_dim": 80},
        {"k_dim": 48, "v_dim": 16},
        {"block_size": 1},
        {"block_size": 64},
    ],
    ids=str,
)
def test_geometries(bench, changes):
    check(bench, LayerCase(geometry=replace(PLAIN, **changes)), MIXED)


@pytest.mark.parametrize("changes", [{}, {"dtype": "bfloat16"}, {"heads": 6}], ids=str)
def test_prompts_without_earlier_keys(bench, changes):
    """Their keys are read where the step made them, past rows' ends and at the end of all."""
    case = replace(LayerCase(geometry=replace(PLAIN, **changes)), lse=True)
    for rows in ([(130, 130), (1, 30), (40, 40), (2, 2)], [(70, 70)]):
        batch = PagedBatch(case.geometry, rows, 0, bench.placement(case.geometry))
        backend = bench.build(case.geometry, batch.placement.layout)
        assert backend.plan(batch.batch).is_fresh
        check(bench, case, rows, padding=2)


def test_bounds_of_a_captured_step_are_not_taken_for_prompts(bench):
    """A step that is captured has rows of one token, and larger bounds."""
    batch = PagedBatch(PLAIN, [(1, 1), (1, 1)], 0, bench.placement(PLAIN)).batch
    batch.max_query_len = 64
    plan = bench.build(PLAIN, bench.placement(PLAIN).layout).plan(batch)
    assert plan.has_ragged_rows
    assert not plan.is_fresh


def test_parts_are_counted_from_zero_again(bench):
    """A second step on the same backend, and one of more rows, find the counters as they were."""
    placement = bench.placement(PLAIN)
    backend = bench.build(PLAIN, placement.layout)
    layer = LayerCase(geometry=PLAIN).layer(bench.torch_device, np.random.default_rng(1))
    for rows in ([(1, 700)], [(1, 700)], [(1, 700), (1, 9), (1, 300)]):
        batch = PagedBatch(PLAIN, rows, 3, placement)
        with interpreting():
            out = batch.run(backend, layer)
        want = batch.truth(layer)[0]
        np.testing.assert_allclose(out.double().numpy(), want, atol=1e-5, rtol=1e-5)
        assert all(not counters.any() for counters in backend._counters)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kind": "mla"}, "kind mla"),
        ({"tree_mask": True}, "tree"),
        ({"dtype": "float64"}, "dtype float64"),
        ({"kv_dtype": "int8"}, "cache dtype int8"),
        ({"k_head_dim": 512}, "longer than 256"),
    ],
)
def test_refusals(changes, reason):
    backend = interpreted("attention").TritonAttention
    verdict = backend.accepts(replace(PLAIN.need, **changes), INFO)
    assert reason in " ".join(verdict.reasons)


def test_captured_steps_are_accepted():
    backend = interpreted("attention").TritonAttention
    assert backend.accepts(replace(PLAIN.need, captured=True), INFO)


@pytest.mark.parametrize("shared", [64 << 10, 99 << 10, 227 << 10])
@pytest.mark.parametrize("dim", [16, 64, 128, 256])
@pytest.mark.parametrize("num_bytes", [2, 4])
@pytest.mark.parametrize("group", [1, 3, 8, 32])
def test_tiles_fit(shared, dim, num_bytes, group):
    """Keys and values under way, and the queries beside them, fit into what threads share."""
    sizes = HeadSizes(group, dim, dim, num_bytes)
    device = DeviceSizes(132, shared)
    for found in (ragged_tuning(sizes, device), fresh_tuning(sizes, device)):
        queries = found.queries * found.packed * dim * num_bytes
        assert queries + found.num_stages * sizes.tile_bytes(found.tile) <= shared
        assert found.packed >= group
        assert found.queries * found.packed >= 16
    for programs in (1, 64, 4096):
        found = decode_tuning(sizes, programs, device)
        assert found.num_stages * sizes.tile_bytes(found.tile) <= shared
        assert 1 <= found.splits <= 32
