"""The CPU's attention, in C and by numba, against the per-sequence float64 oracle: features,
shapes, bits, and errors."""

import os
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from attention_provider import DEVICE, MIXED, NATIVE, NUMBA

from cardan.core.interfaces.attention import KVLayout, LayerParams
from cardan.core.interfaces.errors import UnsupportedError
from cardan.platforms.cpu.native import attention as native
from cardan.platforms.cpu.native.library import open_library
from cardan.platforms.cpu.numba import attention as numba
from cardan.platforms.cpu.numba.availability import missing_reason
from cardan.testing.conformance.attention_truth import error_text
from cardan.testing.conformance.paged_batches import Geometry

FEATURES = list(product((None, 1, 6, 100), (None, 1.5), (False, True), (False, True)))
DTYPES = ("float32", "bfloat16", "float16")


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def provider_of(name, monkeypatch):
    if name == "numba":
        if missing_reason() is not None:
            pytest.skip(str(missing_reason()))
        return NUMBA
    if name == "scalar":
        functions = native.bind(open_library({**os.environ, "CARDAN_CPU_ISA": name}))
        monkeypatch.setattr(native, "_functions", lambda: functions)
    return NATIVE


@pytest.fixture(params=["best", "numba"])
def provider(request, monkeypatch):
    return provider_of(request.param, monkeypatch)


@pytest.fixture(params=["best", "scalar", "numba"])
def any_isa(request, monkeypatch):
    """In C also with plain instructions alone."""
    return provider_of(request.param, monkeypatch)


@pytest.mark.parametrize("dtype", DTYPES)
def test_features_agree_with_oracle(any_isa, dtype):
    rng = np.random.default_rng(3)
    # No dim is a multiple of any vector.
    geometry = Geometry(dtype=dtype, k_dim=22, v_dim=19)
    batches = [any_isa.make(geometry, MIXED, seed, padding=2) for seed in range(2)]
    for place, (window, softcap, alibi, sinks) in enumerate(FEATURES):
        layer = LayerParams(
            scale=0.25,
            window=window,
            softcap=softcap,
            alibi_slopes=torch.from_numpy(rng.uniform(0.01, 0.6, 6)) if alibi else None,
            sinks=torch.from_numpy(rng.standard_normal(6)).to(torch.bfloat16) if sinks else None,
        )
        any_isa.check(batches[place % 2], layer)


@pytest.mark.parametrize("kv_dtype", [*DTYPES, "int8"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_caches_in_other_dtypes(any_isa, dtype, kv_dtype):
    for dims in ((64, 64), (22, 19), (1, 5)):
        geometry = Geometry(dtype=dtype, kv_dtype=kv_dtype, k_dim=dims[0], v_dim=dims[1])
        batch = any_isa.make(geometry, [(20, 70), *MIXED[:7]], dims[0], padding=1)
        for window in (None, 9):
            layer = LayerParams(scale=dims[0] ** -0.5, window=window, softcap=5.0)
            any_isa.check(batch, layer, 3 if kv_dtype == "int8" else 1)


@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (6, 1), (10, 2), (7, 1), (24, 2)])
@pytest.mark.parametrize("dims", [(64, 64), (16, 8), (8, 40), (1, 3)])
def test_heads_and_dims(any_isa, heads, dims):
    geometry = Geometry(heads=heads[0], kv_heads=heads[1], k_dim=dims[0], v_dim=dims[1])
    any_isa.check(any_isa.make(geometry, MIXED[:7]), LayerParams(scale=dims[0] ** -0.5))


@pytest.mark.parametrize("block_size", [1, 3, 16, 128])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_block_sizes_and_long_rows(provider, block_size, dtype):
    """Long rows of few lines are cut into items, whose sums are merged."""
    geometry = Geometry(heads=3, kv_heads=1, dtype=dtype, block_size=block_size)
    rows = [(1, 2500), (2, 1025), (1, 1024), (1, 3), (40, 1100)]
    for window in (None, 30, 1100):
        provider.check(provider.make(geometry, rows), LayerParams(scale=0.25, window=window))


def test_blocks_before_the_window_are_not_read(provider):
    geometry = Geometry(kind="sliding_window", window=6)
    provider.check(provider.make(geometry, MIXED, drop_before=6), LayerParams(scale=0.25, window=6))


def test_shared_blocks(provider):
    batch = provider.make(Geometry(), [(1, 9), (3, 15), (8, 40)], shared=1)
    provider.check(batch, LayerParams(scale=0.25))


@pytest.mark.parametrize("window", [None, 21])
def test_bits_do_not_depend_on_batch_or_threads(provider, window):
    geometry = Geometry(dtype="bfloat16")
    layer = LayerParams(scale=0.25, window=window, softcap=3.0)
    for row in [(1, 700), (1, 1500), (2, 37), (50, 90)]:
        together = provider.make(geometry, [row, *MIXED], 5)
        outs = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            outs.append(together.run(provider.build(geometry), layer)[: row[0]])
        # The first row draws the same numbers in a batch of its own.
        outs.append(provider.make(geometry, [row], 5).run(provider.build(geometry), layer))
        assert all(torch.equal(outs[0], out) for out in outs[1:])


def test_parts_of_wider_tensors_and_other_strides(provider):
    geometry = Geometry()
    batch = provider.make(geometry, MIXED, padding=3)
    layer = LayerParams(scale=0.25)
    q, k, v = (batch.packed(x) for x in (batch.queries, batch.keys, batch.values))
    fused = torch.cat((q, k, v), dim=1).split([6, 2, 2], dim=1)
    spread = [torch.stack((x, x), dim=-1)[..., 0] for x in (q, k, v)]
    swapped = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    for q, k, v in (fused, spread, swapped):
        backend = provider.build(geometry)
        plan = backend.plan(batch.batch)
        backend.write(k, v, batch.cache, plan)
        out = backend.run(q, batch.cache, plan, layer)
        count = batch.num_query_tokens
        assert not error_text(out[:count], batch.truth(layer)[0], provider.tolerance["float32"])
        assert (out[count:] == 0).all()


@pytest.mark.parametrize("kv_dtype", [*DTYPES, "int8"])
def test_writes_touch_their_slots_alone_with_the_bits_of_torch(provider, kv_dtype):
    geometry = Geometry(k_dim=5, v_dim=9, kv_dtype=kv_dtype)
    batch = provider.make(geometry, MIXED, padding=4)
    before = batch.cache.clone()
    backend = provider.build(geometry)
    keys, values = batch.packed(batch.keys), batch.packed(batch.values)
    backend.write(keys, values, batch.cache, backend.plan(batch.batch))
    size = geometry.block_size
    for kind, part in enumerate((keys, values)):
        stored = geometry.stored(part)
        for token, slot in enumerate(batch.batch.slot_mapping.tolist()):
            if slot >= 0:
                place = before[slot // size, kind, :, slot % size]
                given = part.shape[2] if kv_dtype == "int8" else stored.shape[2]
                place[:, :given] = stored[token][:, :given]
                if kv_dtype == "int8":
                    # Nobody reads what is between the last element and the scale.
                    place[:, given:-4] = batch.cache[slot // size, kind, :, slot % size, given:-4]
                    place[:, -4:] = stored[token][:, -4:]
    assert torch.equal(before.view(torch.uint8), batch.cache.view(torch.uint8))


def test_halves_of_all_kinds_are_widened(any_isa):
    """Subnormal, largest and negative numbers of float16, as values that one key alone gives."""
    geometry = Geometry(heads=1, kv_heads=1, k_dim=8, v_dim=16, kv_dtype="float16")
    batch = any_isa.make(geometry, [(1, 1)])
    values = [0.0, -0.0, 6e-8, -6e-8, 3e-5, 6.1e-5, 1.0, -1.5, 65504.0, -65504.0, 0.1, 2048.0]
    batch.values[0][0, 0, :12] = torch.tensor(values)
    batch.values[0][0, 0, 12:14] = torch.tensor([torch.inf, -torch.inf])
    batch.values[0][0, 0, 14] = torch.nan
    out = batch.run(any_isa.build(geometry), LayerParams(scale=1.0))[0, 0]
    want = batch.values[0][0, 0].half().float()
    assert torch.equal(out[:14], want[:14])
    assert out[14].isnan()


def test_what_is_not_finite_in_an_int8_cache_stays_visible(provider):
    geometry = Geometry(kv_dtype="int8")
    batch = provider.make(geometry, [(1, 3), (1, 9), (20, 20)])
    batch.values[1][-1, 0, 3] = torch.inf
    out = batch.run(provider.build(geometry), LayerParams(scale=0.25))
    assert out[1, :3].isnan().all()
    assert out[1, 3:].isfinite().all()
    assert out[[0, *range(2, 22)]].isfinite().all()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tree_mask": True}, "tree masks"),
        ({"kind": "mla"}, "kind mla is not mha"),
        ({"kv_dtype": "float8_e4m3"}, "kv dtype"),
        ({"dtype": "float64", "kv_dtype": "float64"}, "dtype float64 is not among float32"),
    ],
)
@pytest.mark.parametrize(("module", "backend"), [(native, NATIVE), (numba, NUMBA)])
def test_refusals(module, backend, changes, reason, monkeypatch):
    for missing in ("unavailable_reason", "missing_reason"):
        if hasattr(module, missing):
            monkeypatch.setattr(module, missing, lambda: None)
    everything = {name: True for name in ("softcap", "sinks", "alibi", "lse")}
    need = replace(Geometry().need, windows=frozenset({8}), **everything)
    assert backend.backend.accepts(need, DEVICE)
    verdict = backend.backend.accepts(replace(need, **changes), DEVICE)
    assert not verdict
    assert reason in verdict.reasons[0]


def test_numba_refuses_without_numba_and_to_be_captured(monkeypatch):
    monkeypatch.setattr(numba, "missing_reason", lambda: None)
    need = replace(Geometry().need, captured=True)
    assert "cannot be captured" in NUMBA.backend.accepts(need, DEVICE).reasons[0]
    monkeypatch.setattr(numba, "missing_reason", lambda: "numba is not installed")
    verdict = NUMBA.backend.accepts(Geometry().need, DEVICE)
    assert verdict.reasons == ("numba is not installed",)


def test_bad_input_is_named(provider):
    geometry = Geometry()
    batch = provider.make(geometry, [(1, 9), (12, 30)])
    backend, layer = provider.build(geometry), LayerParams(scale=0.25)
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
        provider.backend(geometry.spec, KVLayout(), None)
    with pytest.raises(ValueError, match=r"block_table must be torch\.int32, got torch\.int64"):
        backend.plan(replace(view, block_table=view.block_table.long()))


def test_tables_beyond_the_cache_are_not_followed(provider):
    geometry = Geometry()
    batch = provider.make(geometry, [(1, 9), (12, 30)])
    backend, layer = provider.build(geometry), LayerParams(scale=0.25)
    q, k, v = (batch.packed(x) for x in (batch.queries, batch.keys, batch.values))
    for row, block in product((0, 1), (10**6, -1)):
        table = batch.batch.block_table.clone()
        table[row, 1] = block
        plan = backend.plan(replace(batch.batch, block_table=table))
        with pytest.raises(IndexError, match=f"beyond the {len(batch.cache)} of the cache"):
            backend.run(q, batch.cache, plan, layer)
    slots = batch.batch.slot_mapping + 10**6
    with pytest.raises(IndexError, match="slot mapping"):
        backend.write(k, v, batch.cache, backend.plan(replace(batch.batch, slot_mapping=slots)))


def test_numba_refuses_lengths_beyond_the_table():
    if missing_reason() is not None:
        pytest.skip(str(missing_reason()))
    batch = NUMBA.make(Geometry(), [(1, 9), (12, 30)])
    with pytest.raises(ValueError, match="what its blocks hold"):
        NUMBA.build(batch.geometry).plan(replace(batch.batch, seq_lens_host=[9, 300]))
