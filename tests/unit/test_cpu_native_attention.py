"""What native attention has alone: parts of rows, plans that are kept, recorded calls."""

import ctypes
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_provider import DEVICE, MIXED, NATIVE

from cardan.core.interfaces.attention import LayerParams
from cardan.platforms.cpu.native import attention as native
from cardan.platforms.cpu.native.attention import NativeAttention
from cardan.platforms.cpu.native.library import NativeUnavailable, library, open_library
from cardan.testing.conformance.attention_truth import error_text
from cardan.testing.conformance.paged_batches import Geometry

TOLERANCE = NATIVE.tolerance
build, make, check = NATIVE.build, NATIVE.make, NATIVE.check


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["best", "scalar"])
def isa(request, monkeypatch):
    """All this machine has, and plain instructions alone."""
    wanted = {} if request.param == "best" else {"CARDAN_CPU_ISA": request.param}
    functions = native.bind(open_library({**os.environ, **wanted}))
    monkeypatch.setattr(native, "_functions", lambda: functions)


@pytest.mark.parametrize("dims", [(80, 72), (100, 36), (24, 130)])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16", "int8"])
def test_dims_that_fill_no_whole_vectors_of_a_cache(dims, kv_dtype):
    geometry = Geometry(heads=3, kv_heads=1, k_dim=dims[0], v_dim=dims[1], kv_dtype=kv_dtype)
    check(make(geometry, MIXED[:5]), LayerParams(scale=dims[0] ** -0.5))


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_bits_do_not_depend_on_who_sums_the_parts_of_a_row(kv_dtype, window):
    """A long row alone is shared by the threads; among many its parts are summed by one."""
    geometry = Geometry(heads=6, kv_heads=2, kv_dtype=kv_dtype)
    layer = LayerParams(scale=0.25, window=window)
    alone = make(geometry, [(1, 700)], 5).run(build(geometry), layer)
    among = make(geometry, [(1, 700)] + [(1, 600)] * 9, 5)
    assert torch.equal(alone, among.run(build(geometry), layer)[:1])
    check(among, layer)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "float16", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_written_bits_are_those_of_torch(dtype, kv_dtype):
    geometry = Geometry(k_dim=37, v_dim=21, dtype=dtype, kv_dtype=kv_dtype)
    batch = make(geometry, MIXED)
    rng = np.random.default_rng(8)
    keys, values = (
        torch.from_numpy(rng.standard_normal((batch.num_query_tokens, 2, dim)) * 100).to(
            geometry.torch_dtype
        )
        for dim in (37, 21)
    )
    keys[0], keys[1, 0], keys[1, 1, 3] = 0.0, -0.0, torch.inf
    values[0, 0, 20], values[1, 1, 0], values[2] = torch.nan, -torch.inf, 1e-44
    values[3, 0] = torch.arange(-10, 11) + 0.5
    values[3, 0, 0], values[4, 1, 2] = 127, 3.4e38
    backend = build(geometry)
    backend.write(keys, values, batch.cache, backend.plan(batch.batch))
    slots, size = batch.batch.slot_mapping, geometry.block_size
    held = batch.cache.movedim(3, 1)[slots // size, slots % size]
    for kind, given in enumerate((keys, values)):
        want = geometry.stored(given)
        got = held[:, kind, :, : want.shape[-1]].contiguous()
        if kv_dtype == "int8":
            end = given.shape[-1]
            assert torch.equal(got[..., :end], want[..., :end])
            got, want = (x.view(torch.float32)[..., -1] for x in (got, want))
        assert torch.equal(got.nan_to_num(7.5), want.nan_to_num(7.5))


def test_layers_with_other_heads_share_a_plan():
    """Items are cut anew for another number of query heads."""
    batches = [make(Geometry(heads=heads), MIXED, 2) for heads in (2, 12, 2)]
    backend = build(batches[0].geometry)
    plan = backend.plan(batches[0].batch)
    layer = LayerParams(scale=0.25)
    for batch in batches:
        backend.write(batch.packed(batch.keys), batch.packed(batch.values), batch.cache, plan)
        out = backend.run(batch.packed(batch.queries), batch.cache, plan, layer)
        assert not error_text(out, batch.truth(layer)[0], 2e-6)


class Buffers:
    """The tensors of steps of one shape, at fixed addresses, and a forward pass over them."""

    def __init__(self, geometry, batch, backend, layers):
        self.views = {
            name: torch.zeros_like(getattr(batch.batch, name))
            for name in ("query_start_loc", "seq_lens", "positions", "token_rows", "slot_mapping")
        }
        self.views["block_table"] = torch.zeros_like(batch.batch.block_table)
        self.cache = torch.zeros_like(batch.cache)
        self.parts = [
            torch.zeros_like(batch.packed(x)) for x in (batch.queries, batch.keys, batch.values)
        ]
        self.backend, self.layers = backend, layers

    def fill(self, batch):
        for name, tensor in self.views.items():
            tensor.copy_(getattr(batch.batch, name))
        self.cache[: len(batch.cache)].copy_(batch.cache)
        for part, given in zip(self.parts, (batch.queries, batch.keys, batch.values), strict=True):
            part.copy_(batch.packed(given))
        return replace(batch.batch, **self.views)

    def forward(self, plan):
        q, k, v = self.parts
        self.backend.write(k, v, self.cache, plan)
        return [self.backend.run(q, self.cache, plan, layer) for layer in self.layers]


def replay(calls):
    function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p)
    return [function(call.address)(call.fields) for call in calls]


def record(forward):
    recorder = library().recorder
    with recorder.record():
        outs = forward()
        return recorder.take(), outs


def test_recorded_calls_run_later_steps():
    """A pass recorded with the harmless step of a shape serves any step of it, and what is
    planned and run meanwhile at other shapes does not matter."""
    rows = [
        [(1, 1)] * 6,
        [(1, 900), (1, 3), (1, 257), (1, 1), (1, 64), (1, 1000)],
        [(0, 0), (6, 6), (0, 0), (0, 0), (0, 0), (0, 990)],
        [(1, 2), (1, 1000), (3, 700), (0, 0), (1, 5), (0, 0)],
    ]
    geometry = Geometry(dtype="bfloat16")
    steps = [make(geometry, [*step, (0, 1001)], seed) for seed, step in enumerate(rows, 2)]
    layers = [LayerParams(scale=0.25), LayerParams(scale=0.5, window=30)]
    sinks = torch.randn(6, dtype=torch.float64)
    layers.append(LayerParams(scale=0.25, sinks=sinks))
    widths = {tuple(batch.batch.block_table.shape) for batch in steps}
    assert len(widths) == 1
    largest = max(steps, key=lambda batch: len(batch.cache))
    backend = build(geometry)
    buffers = Buffers(geometry, largest, backend, layers)
    for name in ("query_start_loc", "seq_lens"):
        buffers.views[name].copy_(getattr(steps[0].batch, name))
    buffers.views["slot_mapping"].fill_(-1)
    harmless = replace(steps[0].batch, **buffers.views, max_query_len=6, max_seq_len=1001)
    plan = backend.plan(harmless)
    buffers.forward(plan)
    calls, outs = record(lambda: buffers.forward(plan))
    other = make(geometry, [(9, 20), (1, 30)], 9)
    for batch in steps:
        other.run(backend, layers[0])
        view = buffers.fill(batch)
        # The same addresses are the same plan.
        assert backend.plan(view) is plan
        for out in outs:
            out.fill_(torch.nan)
        assert replay(calls) == [0] * len(calls)
        for out, layer in zip(outs, layers, strict=True):
            count = batch.num_query_tokens
            assert not error_text(out[:count], batch.truth(layer)[0], TOLERANCE["bfloat16"])
            assert (out[count:] == 0).all()


def test_replayed_errors_are_statuses():
    geometry = Geometry()
    batch = make(geometry, [(1, 9), (12, 30)])
    backend, layer = build(geometry), LayerParams(scale=0.25)
    q, _, _ = (batch.packed(x) for x in (batch.queries, batch.keys, batch.values))
    plan = backend.plan(batch.batch)
    calls, _ = record(lambda: backend.run(q, batch.cache, plan, layer))
    batch.batch.seq_lens.add_(40)
    assert replay(calls) == [3]
    batch.batch.seq_lens.sub_(40)
    batch.batch.block_table[0, 1] = 10**6
    assert replay(calls) == [2]


def test_plans_are_kept_for_addresses_that_come_again():
    geometry = Geometry()
    batches = [make(geometry, [(1, 9), (4, 30)], seed) for seed in range(70)]
    backend, layer = build(geometry), LayerParams(scale=0.25)
    plans = [backend.plan(batch.batch) for batch in batches]
    assert backend.plan(batches[-1].batch) is plans[-1]
    assert backend.plan(batches[0].batch) is not plans[0]
    torch.set_num_threads(1)
    assert backend.plan(batches[-1].batch) is not plans[-1]
    # All plans that are held stay right.
    for batch, plan in zip(batches, plans, strict=True):
        backend.write(batch.packed(batch.keys), batch.packed(batch.values), batch.cache, plan)
        out = backend.run(batch.packed(batch.queries), batch.cache, plan, layer)
        assert not error_text(out, batch.truth(layer)[0], 2e-6)


def test_more_heads_than_an_item_has_lines():
    geometry = Geometry(heads=130, kv_heads=1)
    check(make(geometry, [(1, 9), (7, 300), (0, 4), (2, 2)]), LayerParams(scale=0.25))


def test_nan_stays_in_its_row():
    geometry = Geometry()
    batch = make(geometry, [(1, 40), (20, 40), (1, 9)])
    batch.queries[0][-1, 0] = torch.nan
    out = batch.run(build(geometry), LayerParams(scale=0.25))
    assert out[0, 0].isnan().all()
    assert out[0, 1:].isfinite().all()
    assert out[1:].isfinite().all()


def test_steps_without_tokens():
    geometry = Geometry()
    check(make(geometry, [(0, 3), (2, 5), (0, 0)], padding=2), LayerParams(scale=0.25))
    assert len(make(geometry, [(0, 0)]).run(build(geometry), LayerParams(scale=0.25))) == 0


def test_accepts_to_be_captured():
    assert NativeAttention.accepts(replace(Geometry().need, captured=True), DEVICE)


def test_refuses_without_library(monkeypatch):
    def missing():
        raise NativeUnavailable("no C compiler")

    monkeypatch.setattr(native, "unavailable_reason", lambda: "no C compiler")
    monkeypatch.setattr(native, "_functions", missing)
    assert NativeAttention.accepts(Geometry().need, DEVICE).reasons == ("no C compiler",)
    with pytest.raises(NativeUnavailable, match="no C compiler"):
        build(Geometry())


def test_bad_dtypes_are_named():
    batch = make(Geometry(), [(1, 9), (12, 30)])
    backend, layer = build(batch.geometry), LayerParams(scale=0.25)
    q, k, v = (batch.packed(x) for x in (batch.queries, batch.keys, batch.values))
    plan = backend.plan(batch.batch)
    with pytest.raises(ValueError, match=r"q must be torch\.float32, .*, got torch\.float64"):
        backend.run(q.double(), batch.cache, plan, layer)
    with pytest.raises(ValueError, match=r"k and v must have one dtype, got torch\.float16 and"):
        backend.write(k.half(), v, batch.cache, plan)


def test_lengths_beyond_the_table_are_refused():
    batch = make(Geometry(), [(1, 9), (12, 30)])
    backend, layer = build(batch.geometry), LayerParams(scale=0.25)
    q = batch.packed(batch.queries)
    lens = batch.batch.seq_lens + 40
    with pytest.raises(ValueError, match="what its blocks hold"):
        backend.run(q, batch.cache, backend.plan(replace(batch.batch, seq_lens=lens)), layer)
