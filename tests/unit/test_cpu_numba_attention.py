"""Attention compiled by numba against the per-sequence float64 oracle: features, shapes, errors."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from cardan.core.interfaces.attention import KVLayout, LayerParams
from cardan.core.interfaces.capabilities import DeviceInfo
from cardan.core.interfaces.errors import UnsupportedError
from cardan.platforms.cpu.numba import attention as module
from cardan.platforms.cpu.numba.attention import NumbaAttention
from cardan.platforms.cpu.numba.availability import missing_reason
from cardan.testing.conformance.attention_truth import error_text
from cardan.testing.conformance.paged_batches import Geometry, PagedBatch, Placement

needs_numba = pytest.mark.skipif(missing_reason() is not None, reason=str(missing_reason()))

DEVICE = DeviceInfo(platform="cpu", index=0, name="test", arch="test")
LAYOUT = NumbaAttention.layout(Geometry().spec, DEVICE)
TOLERANCE = {"float32": 3e-6, "bfloat16": 6e-3, "float16": 8e-4}
# Decode and prompts, chunks with context, rows of several items, a row without tokens.
MIXED = [(1, 1), (1, 9), (5, 5), (3, 17), (1, 300), (0, 7), (8, 8), (70, 200), (2, 2), (1, 65)]
FEATURES = list(product((None, 1, 6, 100), (None, 1.5), (False, True), (False, True)))


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def build(geometry):
    """Planning and running need no open device."""
    return NumbaAttention(geometry.spec, LAYOUT, None)


def make(geometry, rows, seed=1, **placement):
    return PagedBatch(geometry, rows, seed, Placement(layout=LAYOUT, order=seed, **placement))


def check(batch, layer, factor=1):
    """``factor``: of the tolerance, where scores are large or rounded once more."""
    geometry = batch.geometry
    lse = torch.full((batch.batch.num_tokens, geometry.heads), -7.0)
    with torch.inference_mode():
        out = batch.run(build(geometry), layer, lse)
    assert out.dtype == geometry.torch_dtype
    want, want_lse = batch.truth(layer)
    assert not error_text(out, want, TOLERANCE[geometry.dtype] * factor)
    # Sums are float32 whatever the inputs are.
    assert not error_text(lse[: len(want_lse)], want_lse, 4e-6 * factor)
    assert (lse[len(want_lse) :] == -7.0).all()


@needs_numba
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_features_agree_with_oracle(dtype):
    rng = np.random.default_rng(3)
    # No dim is a multiple of any vector.
    geometry = Geometry(dtype=dtype, k_dim=22, v_dim=19)
    batches = [make(geometry, MIXED, seed, padding=2) for seed in range(2)]
    for place, (window, softcap, alibi, sinks) in enumerate(FEATURES):
        layer = LayerParams(
            scale=0.25,
            window=window,
            softcap=softcap,
            alibi_slopes=torch.from_numpy(rng.uniform(0.01, 0.6, 6)) if alibi else None,
            sinks=torch.from_numpy(rng.standard_normal(6)).to(torch.bfloat16) if sinks else None,
        )
        check(batches[place % 2], layer)


@needs_numba
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "float16", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_caches_in_other_dtypes(dtype, kv_dtype):
    for dims in ((64, 64), (22, 19), (1, 5)):
        geometry = Geometry(dtype=dtype, kv_dtype=kv_dtype, k_dim=dims[0], v_dim=dims[1])
        batch = make(geometry, [(20, 70), *MIXED[:7]], dims[0], padding=1)
        for window in (None, 9):
            layer = LayerParams(scale=dims[0] ** -0.5, window=window, softcap=5.0)
            check(batch, layer, 3 if kv_dtype == "int8" else 1)


@needs_numba
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (6, 1), (7, 1), (24, 2)])
@pytest.mark.parametrize("dims", [(64, 64), (16, 8), (8, 40), (1, 3)])
def test_heads_and_dims(heads, dims):
    geometry = Geometry(heads=heads[0], kv_heads=heads[1], k_dim=dims[0], v_dim=dims[1])
    check(make(geometry, MIXED[:7]), LayerParams(scale=dims[0] ** -0.5))


@needs_numba
@pytest.mark.parametrize("block_size", [1, 3, 16, 128])
def test_block_sizes_and_long_rows(block_size):
    geometry = Geometry(heads=3, kv_heads=1, block_size=block_size)
    rows = [(1, 1500), (2, 1025), (1, 3), (40, 1100)]
    for window in (None, 30, 1100):
        check(make(geometry, rows), LayerParams(scale=0.25, window=window))


@needs_numba
def test_bits_do_not_depend_on_batch_or_threads():
    geometry = Geometry(dtype="bfloat16")
    layer = LayerParams(scale=0.25, window=21, softcap=3.0)
    for row in [(1, 700), (2, 37), (50, 90)]:
        together = make(geometry, [row, *MIXED], 5)
        outs = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            outs.append(together.run(build(geometry), layer)[: row[0]])
        # The first row draws the same numbers in a batch of its own.
        outs.append(make(geometry, [row], 5).run(build(geometry), layer))
        assert all(torch.equal(outs[0], out) for out in outs[1:])


@needs_numba
def test_blocks_before_the_window_are_not_read():
    geometry = Geometry(kind="sliding_window", window=6)
    check(make(geometry, MIXED, drop_before=6), LayerParams(scale=0.25, window=6))


@needs_numba
def test_shared_blocks():
    check(make(Geometry(), [(1, 9), (3, 15), (8, 40)], shared=1), LayerParams(scale=0.25))


@needs_numba
def test_parts_of_wider_tensors_and_other_strides():
    geometry = Geometry()
    batch = make(geometry, MIXED, padding=3)
    layer = LayerParams(scale=0.25)
    q, k, v = (batch.packed(x) for x in (batch.queries, batch.keys, batch.values))
    fused = torch.cat((q, k, v), dim=1).split([6, 2, 2], dim=1)
    spread = [torch.stack((x, x), dim=-1)[..., 0] for x in (q, k, v)]
    swapped = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    for q, k, v in (fused, spread, swapped):
        backend = build(geometry)
        plan = backend.plan(batch.batch)
        backend.write(k, v, batch.cache, plan)
        out = backend.run(q, batch.cache, plan, layer)
        count = batch.num_query_tokens
        assert not error_text(out[:count], batch.truth(layer)[0], 3e-6)
        assert (out[count:] == 0).all()


@needs_numba
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "float16", "int8"])
def test_written_bits_are_those_of_torch_and_nothing_else_is_touched(kv_dtype):
    geometry = Geometry(k_dim=5, v_dim=9, kv_dtype=kv_dtype)
    batch = make(geometry, MIXED, padding=4)
    before = batch.cache.clone()
    backend = build(geometry)
    keys, values = batch.packed(batch.keys), batch.packed(batch.values)
    backend.write(keys, values, batch.cache, backend.plan(batch.batch))
    size = geometry.block_size
    for kind, part in enumerate((keys, values)):
        stored = geometry.stored(part)
        for token, slot in enumerate(batch.batch.slot_mapping.tolist()):
            if slot >= 0:
                place = before[slot // size, kind, :, slot % size]
                place[:, : stored.shape[2]] = stored[token]
    bits = {4: torch.int32, 2: torch.int16, 1: torch.int8}[batch.cache.element_size()]
    assert torch.equal(before.view(bits), batch.cache.view(bits))


@needs_numba
def test_halves_of_all_kinds_are_widened():
    """Subnormal, largest and negative numbers of float16, as values that one key alone gives."""
    geometry = Geometry(heads=1, kv_heads=1, k_dim=8, v_dim=16, kv_dtype="float16")
    batch = make(geometry, [(1, 1)])
    values = [0.0, -0.0, 6e-8, -6e-8, 3e-5, 6.1e-5, 1.0, -1.5, 65504.0, -65504.0, 0.1, 2048.0]
    batch.values[0][0, 0, :12] = torch.tensor(values)
    batch.values[0][0, 0, 12:14] = torch.tensor([torch.inf, -torch.inf])
    batch.values[0][0, 0, 14] = torch.nan
    out = batch.run(build(geometry), LayerParams(scale=1.0))[0, 0]
    want = batch.values[0][0, 0].half().float()
    assert torch.equal(out[:14], want[:14])
    assert out[14].isnan()


@needs_numba
def test_what_is_not_finite_in_an_int8_cache_stays_visible():
    geometry = Geometry(kv_dtype="int8")
    batch = make(geometry, [(1, 3), (1, 9), (20, 20)])
    batch.values[1][-1, 0, 3] = torch.inf
    out = batch.run(build(geometry), LayerParams(scale=0.25))
    assert out[1, :3].isnan().all()
    assert out[1, 3:].isfinite().all()
    assert out[[0, *range(2, 22)]].isfinite().all()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tree_mask": True}, "tree masks"),
        ({"kind": "mla"}, "kind mla is not mha"),
        ({"captured": True}, "cannot be captured"),
        ({"kv_dtype": "float8_e4m3"}, "kv dtype"),
        ({"dtype": "float64", "kv_dtype": "float64"}, "dtype float64 is not among float32"),
    ],
)
def test_refusals(changes, reason, monkeypatch):
    monkeypatch.setattr(module, "missing_reason", lambda: None)
    everything = {name: True for name in ("softcap", "sinks", "alibi", "lse")}
    need = replace(Geometry().need, windows=frozenset({8}), **everything)
    assert NumbaAttention.accepts(need, DEVICE)
    verdict = NumbaAttention.accepts(replace(need, **changes), DEVICE)
    assert not verdict
    assert reason in verdict.reasons[0]


def test_refuses_without_numba(monkeypatch):
    monkeypatch.setattr(module, "missing_reason", lambda: "numba is not installed")
    verdict = NumbaAttention.accepts(Geometry().need, DEVICE)
    assert verdict.reasons == ("numba is not installed",)


@needs_numba
def test_bad_input_is_named():
    geometry = Geometry()
    batch = make(geometry, [(1, 9), (12, 30)])
    backend, layer = build(geometry), LayerParams(scale=0.25)
    q, k, v = (batch.packed(x) for x in (batch.queries, batch.keys, batch.values))
    view, cache = batch.batch, batch.cache
    plan = backend.plan(view)
    with pytest.raises(ValueError, match=r"q \(5, 6, 16\) must be \(13, num_heads, 16\)"):
        backend.run(q[:5], cache, plan, layer)
    with pytest.raises(ValueError, match="5 query heads are no multiple of 2"):
        backend.run(q[:, :5], cache, plan, layer)
    with pytest.raises(ValueError, match="sinks has 3 elements for 6 heads"):
        backend.run(q, cache, plan, replace(layer, sinks=torch.zeros(3)))
    with pytest.raises(ValueError, match="the cache must be contiguous"):
        backend.run(q, cache[:, :, :, :2], plan, layer)
    with pytest.raises(ValueError, match=r"k .* and v .* must be"):
        backend.write(k[:, :1], v, cache, plan)
    with pytest.raises(UnsupportedError, match="scaled"):
        backend.run(q, cache, plan, replace(layer, k_scale=torch.ones(1)))
    with pytest.raises(UnsupportedError, match="cannot honour tree_mask"):
        backend.plan(replace(view, features=frozenset({"tree_mask"})))
    with pytest.raises(UnsupportedError, match="own cache layout"):
        NumbaAttention(geometry.spec, KVLayout(), None)
    with pytest.raises(ValueError, match=r"block_table must be torch\.int32, got torch\.int64"):
        backend.plan(replace(view, block_table=view.block_table.long()))
    with pytest.raises(ValueError, match="what its blocks hold"):
        backend.plan(replace(view, seq_lens_host=[9, 300]))


@needs_numba
def test_tables_beyond_the_cache_are_not_followed():
    geometry = Geometry()
    batch = make(geometry, [(1, 9), (12, 30)])
    backend, layer = build(geometry), LayerParams(scale=0.25)
    q, k, v = (batch.packed(x) for x in (batch.queries, batch.keys, batch.values))
    for row, block in ((0, 10**6), (1, -1)):
        table = batch.batch.block_table.clone()
        table[row, 1] = block
        plan = backend.plan(replace(batch.batch, block_table=table))
        with pytest.raises(IndexError, match=f"beyond the {len(batch.cache)} of the cache"):
            backend.run(q, batch.cache, plan, layer)
    slots = batch.batch.slot_mapping + 10**6
    with pytest.raises(IndexError, match="slot mapping"):
        backend.write(k, v, batch.cache, backend.plan(replace(batch.batch, slot_mapping=slots)))
