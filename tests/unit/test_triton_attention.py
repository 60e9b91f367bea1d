"""Triton's attention under the interpreter against the formula in float64."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from triton_interpreter import interpreted, interpreting

from cardan.core.interfaces.attention import KVLayout, LayerParams
from cardan.core.interfaces.capabilities import Capabilities, DeviceInfo
from cardan.core.interfaces.errors import UnsupportedError
from cardan.core.interfaces.torch_device import TorchDevice
from cardan.platforms.cpu.platform import CpuPlatform
from cardan.platforms.shared.triton.attention_tuning import (
    HeadSizes,
    PrefillTuning,
    decode_tuning,
    prefill_tuning,
    ragged_tuning,
)
from cardan.platforms.shared.triton.targets import DeviceSizes
from cardan.testing.conformance.attention_bench import AttentionBench, LayerCase
from cardan.testing.conformance.attention_truth import attend_row
from cardan.testing.conformance.paged_batches import Geometry, PagedBatch

INFO = DeviceInfo(platform="test", index=0, name="test", arch="sm_90")
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
        {"heads": 16, "kv_heads": 1},
        {"heads": 21, "kv_heads": 3},
        {"k_dim": 80, "v_dim": 80},
        {"k_dim": 48, "v_dim": 16},
        {"block_size": 1},
        {"block_size": 256},
        {"kv_dtype": "int8"},
        {"kv_dtype": "int8", "dtype": "bfloat16", "k_dim": 20, "v_dim": 36},
        {"kv_dtype": "int8", "dtype": "float16", "heads": 3, "kv_heads": 1},
        {"kv_dtype": "float8_e4m3"},
        {"kv_dtype": "float8_e4m3", "dtype": "bfloat16", "block_size": 1},
        {"kv_dtype": "float8_e4m3", "dtype": "float16", "k_dim": 48, "v_dim": 16},
    ],
    ids=str,
)
def test_geometries(bench, changes):
    check(bench, LayerCase(geometry=replace(PLAIN, **changes)), MIXED)


@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3"])
def test_short_caches_with_all_features(bench, kv_dtype):
    case = replace(LayerCase(geometry=replace(PLAIN, kv_dtype=kv_dtype)), **FEATURES["all"])
    for rows in (MIXED, LONG):
        check(bench, case, rows, order=2, padding=3, drop_before=case.window)


def test_int8_values_far_from_unit_size(bench):
    """Scales that float16 cannot hold, beside weights that it can."""
    geometry = replace(PLAIN, dtype="float16", kv_dtype="int8")
    batch = PagedBatch(geometry, [(1, 1), (6, 6)], 5, bench.placement(geometry))
    for parts in (batch.keys, batch.values):
        parts[:] = [part * 2e-5 for part in parts]
    out, _ = run(bench, batch, LayerParams(scale=1.0))
    want, _ = batch.truth(LayerParams(scale=1.0))
    np.testing.assert_allclose(out.double().numpy(), want, rtol=2e-2, atol=2e-7)


def run(bench, batch, layer, lse=False):
    with interpreting():
        return bench.run(batch, layer, lse)


@pytest.mark.parametrize("kv_dtype", ["float16", "int8"])
def test_prompts_see_what_the_cache_made_of_their_keys(bench, kv_dtype):
    """As later steps and other chunks of the same prompt do."""
    geometry = replace(PLAIN, kv_dtype=kv_dtype)
    batch = PagedBatch(geometry, [(40, 40)], 5, bench.placement(geometry))
    for parts in (batch.keys, batch.values):
        parts[:] = [torch.randn(part.shape) for part in parts]
    layer = LayerParams(scale=0.3)
    out, _ = run(bench, batch, layer)
    np.testing.assert_allclose(out.double().numpy(), batch.truth(layer)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("rows", "scales"),
    [([(1, 70), (1, 5), (1, 1)], (1, 2)), (MIXED, (2, 1)), ([(0, 3), (2, 5), (0, 0)], (1, 1))],
)
def test_scales_of_a_layer(bench, rows, scales):
    """Of all heads, or of each; the cache has what they multiply."""
    generator = torch.Generator().manual_seed(3)
    k_scale, v_scale = (torch.rand(count, generator=generator) + 0.5 for count in scales)
    geometry = replace(PLAIN, kv_dtype="float8_e4m3")
    batch = PagedBatch(geometry, rows, 5, bench.placement(geometry))
    layer = LayerParams(scale=0.2, softcap=3.0, k_scale=k_scale, v_scale=v_scale)
    out, _ = run(bench, batch, layer)
    plain = LayerParams(scale=0.2, softcap=3.0)
    want = [
        attend_row(q[len(q) - count :], k * k_scale[:, None], v * v_scale[:, None], plain)[0]
        for q, k, v, (count, _) in zip(batch.queries, batch.keys, batch.values, rows, strict=True)
    ]
    np.testing.assert_allclose(out.double().numpy(), np.concatenate(want), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "rows", [[(1, 40), (1, 3)], [(3, 9), (1, 40)], [(0, 0), (0, 0)], [(0, 2), (1, 40)]], ids=str
)
def test_tokens_of_no_row_yield_zeros(bench, rows, monkeypatch):
    module = interpreted("attention")
    monkeypatch.setattr(
        module.torch, "empty", lambda *shape, **more: torch.full(_shape(shape), torch.nan, **more)
    )
    batch = PagedBatch(PLAIN, rows, 5, bench.placement(PLAIN, padding=5))
    backend = bench.build(PLAIN, batch.placement.layout)
    plan = backend.plan(batch.batch)
    with interpreting():
        backend.write(batch.packed(batch.keys), batch.packed(batch.values), batch.cache, plan)
        q = batch.packed(batch.queries)
        out = backend.run(q, batch.cache, plan, LayerParams(scale=0.2))
    assert out.isfinite().all()
    assert not out[batch.num_query_tokens :].any()


def _shape(shape):
    return shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape


def test_sums_and_tables_of_any_strides(bench):
    batch = PagedBatch(PLAIN, MIXED, 5, bench.placement(PLAIN))
    backend = bench.build(PLAIN, batch.placement.layout)
    table = batch.batch.block_table
    batch.batch.block_table = torch.stack((table, table + 1), 2)[..., 0]
    layer = LayerParams(scale=0.2, sinks=torch.stack((torch.zeros(4), torch.ones(4)), 1)[:, 1])
    sums = torch.zeros(PLAIN.heads, batch.num_query_tokens).T
    with interpreting():
        out = batch.run(backend, layer, sums)
    want, want_sums = batch.truth(layer)
    np.testing.assert_allclose(out.double().numpy(), want, atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(sums.double().numpy(), want_sums, atol=1e-5, rtol=1e-5)


def test_windows_beyond_what_kernels_count_in(bench):
    case = LayerCase(geometry=PLAIN, window=2**40)
    check(bench, case, [(1, 40), (5, 30)])


def test_steps_of_one_token_a_row_are_no_prompts(bench):
    """Nothing is kept of them, whatever their lengths."""
    batch = PagedBatch(PLAIN, [(1, 1), (1, 1)], 0, bench.placement(PLAIN)).batch
    plan = bench.build(PLAIN, bench.placement(PLAIN).layout).plan(batch)
    assert not plan.long_rows.is_fresh


@pytest.mark.parametrize("changes", [{}, {"dtype": "bfloat16"}, {"heads": 6}], ids=str)
def test_prompts_without_earlier_keys(bench, changes):
    """Their keys are read where the step made them, past rows' ends and at the end of all."""
    case = replace(LayerCase(geometry=replace(PLAIN, **changes)), lse=True)
    for rows in ([(130, 130), (1, 30), (2, 2)], [(70, 70)]):
        batch = PagedBatch(case.geometry, rows, 0, bench.placement(case.geometry))
        backend = bench.build(case.geometry, batch.placement.layout)
        assert backend.plan(batch.batch).long_rows.is_fresh
        check(bench, case, rows, padding=2)


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of 16 or so, so that short rows have many of them; they can be changed."""

    def change(**changes):
        found = replace(PrefillTuning(16, 16, 16, num_warps=4, num_stages=2), **changes)
        monkeypatch.setattr(interpreted("prefill"), "prefill_tuning", lambda *sizes: found)

    change()
    return change


@pytest.mark.parametrize("changes", [{"queries": 32}, {"tile": 32}], ids=str)
def test_many_tiles_of_prompts(bench, small_tiles, changes):
    """Tiles of which all keys are seen and some, rows that end within a tile, tokens of no row."""
    small_tiles(**changes)
    case = replace(LayerCase(geometry=PLAIN), sinks=True, lse=True)
    check(bench, case, [(81, 81), (1, 30), (32, 32), (2, 2), (15, 15)], padding=20)


@pytest.mark.parametrize("window", [1, 40])
def test_windows_over_many_tiles_of_prompts(bench, small_tiles, window):
    case = replace(LayerCase(geometry=PLAIN), **{**FEATURES["all"], "window": window})
    check(bench, case, [(70, 70), (3, 3)], padding=2)


@pytest.mark.parametrize(
    ("changes", "at_once"),
    [
        ({}, 1),
        ({"heads": 6, "k_dim": 48, "v_dim": 16}, 2),
        ({"dtype": "float16", "kv_dtype": "int8", "block_size": 1}, 2),
        ({"dtype": "bfloat16", "kv_dtype": "float8_e4m3"}, 2),
    ],
    ids=str,
)
def test_long_chunks_behind_a_prefix(bench, small_tiles, monkeypatch, changes, at_once):
    """Their keys are gathered, those of some key heads at a time."""
    module = interpreted("prefill")
    geometry = replace(PLAIN, **changes)
    rows = [(65, 90), (1, 40), (2, 35)]
    num_keys = 125
    num_bytes = HeadSizes(
        1, geometry.k_dim, geometry.v_dim, geometry.torch_dtype.itemsize
    ).tile_bytes(num_keys)
    monkeypatch.setattr(module, "_LEAST_QUERIES_GATHERED", 40)
    monkeypatch.setattr(module, "_MOST_GATHERED", at_once * num_bytes)
    calls = []
    gather = module._gather
    monkeypatch.setattr(module, "_gather", lambda *all: calls.append(all) or gather(*all))
    check(bench, replace(LayerCase(geometry=geometry), lse=True), rows, order=2, padding=3)
    assert len(calls) == 2 // at_once


def test_what_is_gathered_is_bounded(bench, small_tiles, monkeypatch):
    """Steps of few queries, windows and contexts longer than that read the cache itself."""
    module = interpreted("prefill")
    monkeypatch.setattr(module, "_gather", None)
    case = LayerCase(geometry=PLAIN)
    rows = [(65, 80)]
    check(bench, case, rows)
    monkeypatch.setattr(module, "_LEAST_QUERIES_GATHERED", 1)
    check(bench, replace(case, window=30), rows, drop_before=30)
    monkeypatch.setattr(module, "_MOST_GATHERED", 79 * 64 * 4)
    check(bench, case, rows)


def test_no_number_behind_a_row_spoils_it(bench, small_tiles):
    """Tiles that would reach into the next row's values, which are NaN."""
    batch = PagedBatch(PLAIN, [(70, 70), (66, 66)], 5, bench.placement(PLAIN))
    batch.values[1][:] = torch.nan
    layer = LayerParams(scale=0.2)
    out, _ = run(bench, batch, layer)
    want, _ = attend_row(batch.queries[0], batch.keys[0], batch.values[0], layer)
    np.testing.assert_allclose(out[:70].double().numpy(), want, atol=1e-5, rtol=1e-5)
    assert out[70:].isnan().all()


def test_bounds_of_a_captured_step_are_not_taken_for_prompts(bench):
    """A step that is captured has rows of one token, and larger bounds."""
    batch = PagedBatch(PLAIN, [(1, 1), (1, 1)], 0, bench.placement(PLAIN)).batch
    batch.max_query_len = 64
    plan = bench.build(PLAIN, bench.placement(PLAIN).layout).plan(batch)
    assert plan.has_ragged_rows
    assert plan.has_single_rows
    assert not plan.long_rows.num_keys
    assert not plan.long_rows.is_fresh


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
        ({"kv_dtype": "float8_e5m2"}, "cache dtype float8_e5m2 is not among float32"),
        ({"num_heads": 5}, "5 heads are no multiple of 2"),
        ({"k_head_dim": 512}, "longer than 256"),
    ],
)
def test_refusals(changes, reason):
    backend = interpreted("attention").TritonAttention
    verdict = backend.accepts(replace(PLAIN.need, **changes), INFO)
    assert reason in " ".join(verdict.reasons)


def test_float8_is_for_devices_that_convert_it():
    backend = interpreted("attention").TritonAttention
    need = replace(PLAIN.need, kv_dtype="float8_e4m3")
    found = {
        arch: bool(backend.accepts(need, replace(INFO, arch=arch)))
        for arch in ("sm_80", "sm_86", "sm_89", "sm_90", "sm_120", "gfx90a", "gfx942", "gfx950")
    }
    assert [arch for arch, accepted in found.items() if not accepted] == [
        "sm_80",
        "sm_86",
        "gfx90a",
    ]
    verdict = backend.accepts(need, replace(INFO, arch="sm_80"))
    assert "float8_e4m3 is not among float32, bfloat16, float16, int8 on sm_80" in str(verdict)


def test_unknown_features_and_caches_are_refused(bench):
    layout = bench.placement(PLAIN).layout
    batch = PagedBatch(PLAIN, [(1, 1)], 0, bench.placement(PLAIN)).batch
    batch.features = frozenset({"tree_mask"})
    with pytest.raises(UnsupportedError, match="cannot honour tree_mask"):
        bench.build(PLAIN, layout).plan(batch)
    with pytest.raises(UnsupportedError, match="no opaque cache"):
        bench.build(PLAIN, KVLayout(opaque=True))
    spec = replace(replace(PLAIN, kv_dtype="int8").spec, scale_bytes=2)
    with pytest.raises(UnsupportedError, match="int8 cache with scales of 2 bytes"):
        bench.backend(spec, layout, bench.device)


def test_captured_steps_are_accepted():
    backend = interpreted("attention").TritonAttention
    assert backend.accepts(replace(PLAIN.need, captured=True), INFO)


@pytest.mark.parametrize("shared", [64 << 10, 99 << 10, 227 << 10])
@pytest.mark.parametrize("dim", [16, 64, 128, 256])
@pytest.mark.parametrize("num_bytes", [1, 2, 4])
@pytest.mark.parametrize("group", [1, 3, 8, 32])
def test_tiles_fit(shared, dim, num_bytes, group):
    """Keys and values under way, and the queries beside them, fit into what threads share."""
    sizes = HeadSizes(group, dim, dim, num_bytes)
    device = DeviceSizes(132, shared)
    found = ragged_tuning(sizes, device)
    queries = found.queries * found.packed * dim * num_bytes
    assert queries + found.num_stages * sizes.tile_bytes(found.tile) <= shared
    assert found.packed >= group
    assert found.queries * found.packed >= 16
    for is_plain in (True, False):
        found = prefill_tuning(sizes, device, is_plain)
        queries = found.queries * dim * num_bytes
        assert queries + found.num_stages * sizes.tile_bytes(found.tile) <= shared
        assert found.queries >= 16
    for programs in (1, 64, 4096):
        found = decode_tuning(sizes, programs, device)
        assert found.num_stages * sizes.tile_bytes(found.tile) <= shared
        assert 1 <= found.splits <= 32
