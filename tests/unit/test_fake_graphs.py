"""Captured work of the fake device, and its attention, against eager results and float64."""

from dataclasses import replace

import pytest
import torch
from fake_devices import open_fake

from cardan.core.interfaces.attention import KVLayout, LayerParams
from cardan.core.interfaces.capabilities import DeviceInfo
from cardan.core.interfaces.errors import OutOfMemoryError, UnsupportedError
from cardan.testing.conformance.attention_truth import error_text
from cardan.testing.conformance.paged_batches import Geometry, PagedBatch, Placement
from cardan.testing.fake.attention import FakeAttention, backends

INFO = DeviceInfo(platform="fake", index=0, name="test", arch="fake")
MIXED = [(1, 1), (1, 9), (5, 5), (3, 17), (1, 33), (8, 8), (13, 40), (1, 12), (2, 2)]
TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2, "float16": 2e-3}


@pytest.fixture
def device():
    opened = open_fake("graphs=full")
    yield opened
    opened.close()


class Work:
    """A small program over fixed tensors, with views, several results and an index."""

    def __init__(self, device):
        self.x = torch.zeros(4, 6)
        self.index = torch.zeros(4, dtype=torch.int64)
        self.state = torch.zeros(6)
        self.device = device
        with device.inference():
            self.weight = torch.randn(6, 6, generator=torch.Generator().manual_seed(1))
        device.synchronize()

    def launch(self):
        y = torch.nn.functional.linear(self.x, self.weight).relu()
        top, place = y.max(-1)
        self.state.add_(y[1:].sum(0))
        return y.index_select(0, self.index), top * 2, place

    def set(self, seed):
        generator = torch.Generator().manual_seed(seed)
        self.x.copy_(torch.randn(4, 6, generator=generator))
        self.index.copy_(torch.randint(0, 4, (4,), generator=generator))


def captured(device, work, pool=None):
    out = []
    with device.inference():
        graph = device.capture(lambda: out.extend(work.launch()), pool)
    return graph, out


def test_replays_equal_eager(device):
    work = Work(device)
    graph, out = captured(device, work)
    assert not work.state.any()  # a capture runs nothing
    before = torch.zeros(6)
    for seed in range(5):
        work.set(seed)
        with device.inference():
            graph.replay()
        device.synchronize()
        got = [x.clone() for x in (*out, work.state)]
        work.state.copy_(before)
        with torch.inference_mode():
            want = [*work.launch(), work.state]
        for ours, theirs in zip(got, want, strict=True):
            assert torch.equal(ours, theirs)
        before = got[-1]
    assert (device.counters.captures, device.counters.replays) == (1, 5)
    assert device.counters.syncs == 0


def test_replays_are_one_launch_in_order(device):
    work = Work(device)
    graph, out = captured(device, work)
    with device.inference():
        launches = device.counters.launches
        results = []
        for seed in range(4):
            work.set(seed)
            graph.replay()
            results.append(out[0].clone())
        assert device.counters.launches - launches <= 4 * 8
    device.synchronize()
    for seed, result in enumerate(results):
        with torch.inference_mode():
            work.set(seed)
            assert torch.equal(result, work.launch()[0])


def test_graphs_of_a_pool_share_memory(device):
    work = Work(device)
    with device.memory.region("graphs"):
        large, first = captured(device, work)
        small, second = captured(device, work, large)
    assert large.num_bytes > 0
    assert small.num_bytes == 0
    assert device.memory.stats().by_tag["graphs"] == large.num_bytes
    assert {x.data_ptr() for x in first} == {x.data_ptr() for x in second}
    alone, third = captured(device, work)
    assert alone.num_bytes == large.num_bytes
    assert not {x.data_ptr() for x in first} & {x.data_ptr() for x in third}
    large.release()
    work.set(0)
    with device.inference():
        small.replay()
    device.synchronize()
    with torch.inference_mode():
        assert torch.equal(second[0], work.launch()[0])
    small.release()
    assert small.num_bytes == 0
    with pytest.raises(UnsupportedError, match="released"):
        small.replay()
    del first, second, large, small
    assert "graphs" not in device.memory.stats().by_tag


@pytest.mark.parametrize(
    ("read", "name"),
    [
        (lambda x: x.sum().item(), "_local_scalar_dense"),
        (lambda x: x[x > 0], "index"),
        (lambda x: x.nonzero(), "nonzero"),
        (lambda x: x.cpu(), "cpu"),
        (lambda x: x.tolist(), "tolist"),
    ],
)
def test_what_needs_the_host_cannot_be_captured(device, read, name):
    x = torch.ones(3)
    with device.inference(), pytest.raises(UnsupportedError, match=rf"{name}.* cannot be captured"):
        device.capture(lambda: read(x))
    # The device works as before.
    with device.inference():
        assert (x + 1).sum().item() == 6
    assert device.counters.captures == 0


def test_limits_of_captures(device):
    with pytest.raises(UnsupportedError, match="nested"):
        device.capture(lambda: device.capture(lambda: None))
    with pytest.raises(UnsupportedError, match="events"):
        device.capture(device.event)
    with pytest.raises(UnsupportedError, match="another device"):
        device.capture(lambda: None, object())
    plain = open_fake()
    with pytest.raises(UnsupportedError, match="does not capture"):
        plain.capture(lambda: None)
    plain.close()
    small = open_fake("graphs=full memory_mb=1")
    with pytest.raises(OutOfMemoryError, match="enforce_eager"):
        small.capture(lambda: torch.zeros(1 << 20))
    small.close()


# -- attention --------------------------------------------------------------------------------


def build(geometry):
    return FakeAttention(geometry.spec, KVLayout(), None)


def layer_params(heads=6, **fields):
    generator = torch.Generator().manual_seed(3)
    if fields.pop("sinks", False):
        fields["sinks"] = torch.randn(heads, generator=generator)
    if fields.pop("alibi", False):
        fields["alibi_slopes"] = torch.rand(heads, generator=generator)
    return LayerParams(scale=0.25, **fields)


def check(batch, layer):
    sums = torch.full((batch.batch.num_tokens, batch.geometry.heads), -7.0)
    with torch.inference_mode():
        out = batch.run(build(batch.geometry), layer, sums)
    want, want_lse = batch.truth(layer)
    assert not error_text(out, want, TOLERANCE[batch.geometry.dtype])
    assert not error_text(sums[: len(want_lse)], want_lse, 2e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_attention_of_mixed_batches(dtype):
    for seed in range(3):
        check(PagedBatch(Geometry(dtype=dtype), MIXED, seed), layer_params())


@pytest.mark.parametrize(
    "extra",
    [
        {"window": 1},
        {"window": 7},
        {"softcap": 1.5},
        {"sinks": True},
        {"alibi": True},
        {"window": 6, "softcap": 2.0, "sinks": True, "alibi": True},
    ],
    ids=str,
)
def test_attention_features(extra):
    check(PagedBatch(Geometry(), MIXED, 4), layer_params(**extra))


@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (4, 1)])
def test_attention_geometries(heads):
    for block_size in (1, 3, 16):
        geometry = Geometry(heads=heads[0], kv_heads=heads[1], block_size=block_size)
        check(PagedBatch(geometry, MIXED, 1), layer_params(heads[0]))
    check(PagedBatch(Geometry(k_dim=8, v_dim=24), MIXED, 2), layer_params())


def test_attention_in_small_parts(monkeypatch):
    monkeypatch.setattr(FakeAttention, "max_gather_bytes", 40_000)
    check(PagedBatch(Geometry(), MIXED, 6), layer_params())


def test_attention_leaves_padding_zero_and_other_slots_alone():
    batch = PagedBatch(Geometry(), [(1, 5), (0, 0), (3, 3), (0, 9)], 3, Placement(padding=5))
    check(batch, layer_params())
    backend = build(batch.geometry)
    before = batch.cache.clone()
    plan = backend.plan(batch.batch)
    backend.write(batch.packed(batch.keys), batch.packed(batch.values), batch.cache, plan)
    out = backend.run(batch.packed(batch.queries), batch.cache, plan, layer_params())
    assert not out[-5:].any()
    torch.testing.assert_close(batch.cache[1:], before[1:], atol=0, rtol=0, equal_nan=True)


def test_attention_refuses_with_reasons():
    need = Geometry().need
    can = replace(
        need, captured=True, softcap=True, sinks=True, alibi=True, lse=True, windows=frozenset({4})
    )
    assert FakeAttention.accepts(can, INFO)
    for change, reason in (
        ({"kind": "mla"}, "mla"),
        ({"kv_dtype": "int8"}, "int8"),
        ({"num_heads": 5}, "multiple"),
        ({"tree_mask": True}, "tree"),
    ):
        assert reason in " ".join(FakeAttention.accepts(replace(need, **change), INFO).reasons)
    batch = PagedBatch(Geometry(), [(1, 2)])
    with pytest.raises(UnsupportedError, match="scaled"):
        batch.run(build(batch.geometry), LayerParams(scale=1.0, k_scale=torch.ones(1)))
    with pytest.raises(UnsupportedError, match="tree_mask"):
        build(batch.geometry).plan(replace(batch.batch, features=frozenset({"tree_mask"})))
    with pytest.raises(UnsupportedError, match="layout"):
        FakeAttention(batch.geometry.spec, KVLayout(order=(0, 1, 2, 3, 4)), None)


def test_faults_choose_another_backend():
    assert backends(frozenset()) == (FakeAttention,)
    assert backends(frozenset({"leak"})) == (FakeAttention,)
    [faulty] = backends(frozenset({"wrong_mask"}))
    assert faulty is not FakeAttention
    assert faulty.name == "fake"


def test_attention_can_be_captured(device):
    """One graph for a shape serves batches of other contents and lengths."""
    geometry = Geometry()
    first = PagedBatch(geometry, [(1, 20), (1, 3), (1, 11)], 1)
    second = PagedBatch(geometry, [(1, 4), (1, 20), (1, 17)], 2)
    backend, layer = build(geometry), layer_params(window=6)
    names = ("query_start_loc", "seq_lens", "positions", "token_rows", "slot_mapping")
    fixed = {name: getattr(first.batch, name).clone() for name in names}
    view = replace(first.batch, block_table=first.batch.block_table.clone(), **fixed)
    cache = torch.zeros(40, *first.cache.shape[1:])
    k, v, q = (first.packed(x).clone() for x in (first.keys, first.values, first.queries))
    out = []

    def launch():
        plan = backend.plan(view)
        backend.write(k, v, cache, plan)
        out.append(backend.run(q, cache, plan, layer))

    with device.inference():
        graph = device.capture(launch)
    for batch in (first, second):
        assert batch.batch.block_table.shape == view.block_table.shape
        for name in (*names, "block_table"):
            getattr(view, name).copy_(getattr(batch.batch, name))
        cache[: len(batch.cache)].copy_(batch.cache)
        k.copy_(batch.packed(batch.keys))
        v.copy_(batch.packed(batch.values))
        q.copy_(batch.packed(batch.queries))
        with device.inference():
            graph.replay()
        device.synchronize()
        assert not error_text(out[0], batch.truth(layer)[0], 2e-6)
