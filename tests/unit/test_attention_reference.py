"""The reference backend against a per-sequence float64 oracle."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from cardan.core.interfaces import torch_attention
from cardan.core.interfaces.attention import KVLayout, LayerParams
from cardan.core.interfaces.capabilities import DeviceInfo
from cardan.core.interfaces.errors import UnsupportedError
from cardan.core.interfaces.torch_attention import cut_pieces
from cardan.core.interfaces.torch_kv_content import loaded_content, stored_content
from cardan.core.ops.reference.attention import ReferenceAttention
from cardan.core.types.kv import KV_DTYPES, KVCacheSpec
from cardan.testing.conformance.attention_truth import error_text
from cardan.testing.conformance.paged_batches import Geometry, PagedBatch, Placement

DEVICE = DeviceInfo(platform="cpu", index=0, name="test", arch="test")
TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2, "float16": 2e-3}
MIXED = [(1, 1), (1, 9), (5, 5), (3, 17), (1, 33), (8, 8), (13, 40), (1, 12), (2, 2)]


def build(backend, geometry):
    """Planning and running need no open device."""
    return backend(geometry.spec, KVLayout(), None)


def check(batch, backend, layer, lse=False):
    sums = torch.full((batch.batch.num_tokens, batch.geometry.heads), -7.0) if lse else None
    with torch.inference_mode():
        out = batch.run(backend, layer, sums)
    assert out.dtype == batch.geometry.torch_dtype
    want, want_lse = batch.truth(layer)
    assert not error_text(out, want, TOLERANCE[batch.geometry.dtype])
    if sums is not None:
        assert not error_text(sums[: len(want_lse)], want_lse, 2e-6)


def layer_params(seed=0, heads=6, **fields):
    generator = torch.Generator().manual_seed(seed)
    if fields.pop("sinks", False):
        fields["sinks"] = torch.randn(heads, generator=generator)
    if fields.pop("alibi", False):
        fields["alibi_slopes"] = torch.rand(heads, generator=generator)
    return LayerParams(scale=0.25, **fields)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("seed", range(3))
def test_mixed_batch(dtype, seed):
    geometry = Geometry(dtype=dtype)
    check(PagedBatch(geometry, MIXED, seed), build(ReferenceAttention, geometry), layer_params())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_caches_in_other_dtypes(dtype, kv_dtype):
    geometry = Geometry(dtype=dtype, kv_dtype=kv_dtype, k_dim=22, v_dim=19)
    assert ReferenceAttention.accepts(geometry.need, DEVICE)
    check(PagedBatch(geometry, MIXED, 3), build(ReferenceAttention, geometry), layer_params())


@pytest.mark.parametrize("head_dim", [1, 4, 7, 64])
def test_int8_content_is_as_documented(head_dim):
    """Against the same rules in NumPy."""
    spec = KVCacheSpec("full", 16, 2, head_dim, head_dim, "int8", scale_bytes=4)
    x = np.random.default_rng(1).standard_normal((5, 2, head_dim)).astype(np.float32)
    x[0], x[1, 0, 0], x[1, 1] = 0, np.nan, 1e-45
    content = stored_content(torch.from_numpy(x), spec, torch.int8)
    assert content.shape == (5, 2, -(-head_dim // 4) * 4 + 4)
    scales = (np.abs(x).max(-1) / np.float32(127)).astype("<f4")
    assert np.array_equal(content.numpy()[..., -4:].copy().view("<f4")[..., 0], scales, True)
    with np.errstate(all="ignore"):
        whole = np.where(scales[..., None] > 0, np.rint(x / scales[..., None]), 0).clip(-127, 127)
    assert np.array_equal(content.numpy()[..., :head_dim], whole)
    back = loaded_content(content, head_dim, spec)
    assert back[1, 0].isnan().all()
    error = (back - torch.from_numpy(x)).abs()[2:]
    assert (error <= torch.from_numpy(scales)[2:, :, None] * 0.5001).all()


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
def test_layer_features_with_lse(extra):
    geometry = Geometry()
    backend = build(ReferenceAttention, geometry)
    check(PagedBatch(geometry, MIXED, 4), backend, layer_params(**extra), lse=True)


@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (4, 1)], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_head_groups_and_block_sizes(heads, block_size):
    geometry = Geometry(heads=heads[0], kv_heads=heads[1], block_size=block_size)
    check(PagedBatch(geometry, MIXED, 1), build(ReferenceAttention, geometry), layer_params())


@pytest.mark.parametrize("dims", [(16, 8), (8, 24)])
def test_key_and_value_dims_differ(dims):
    geometry = Geometry(k_dim=dims[0], v_dim=dims[1])
    check(PagedBatch(geometry, MIXED, 2), build(ReferenceAttention, geometry), layer_params())


def test_padding_tokens_and_idle_rows():
    geometry = Geometry()
    rows = [(1, 5), (0, 0), (3, 3), (0, 9)]
    batch = PagedBatch(geometry, rows, 3, Placement(padding=5))
    backend = build(ReferenceAttention, geometry)
    check(batch, backend, layer_params(), lse=True)
    plan = backend.plan(batch.batch)
    out = backend.run(batch.packed(batch.queries), batch.cache, plan, layer_params())
    assert not out[-5:].any()


def test_no_rows_at_all():
    geometry = Geometry()
    batch = PagedBatch(geometry, [(0, 0)], 0, Placement(padding=3))
    assert batch.run(build(ReferenceAttention, geometry), layer_params()).shape[0] == 0


def test_sliding_window_group_reads_no_dropped_block():
    geometry = Geometry(kind="sliding_window", window=6)
    batch = PagedBatch(geometry, MIXED, 5, Placement(drop_before=6))
    assert (batch.batch.block_table[:, 0] == 0).any()
    check(batch, build(ReferenceAttention, geometry), layer_params(window=6))


def test_layers_of_one_group_may_differ_in_window():
    geometry = Geometry()
    batch, backend = PagedBatch(geometry, MIXED, 6), build(ReferenceAttention, geometry)
    for window in (None, 3, None, 11):
        check(batch, backend, layer_params(window=window))


def test_long_rows_are_cut_and_chunks_are_bounded(monkeypatch):
    monkeypatch.setattr(torch_attention, "MAX_PIECE", 16)
    monkeypatch.setattr(torch_attention, "MIN_KEYS", 8)
    monkeypatch.setattr(ReferenceAttention, "max_chunk_bytes", 60_000)
    geometry = Geometry()
    rows = [(40, 40), (1, 90), (33, 70), (1, 3), (16, 16), (17, 90), *[(1, 20)] * 9]
    batch, backend = PagedBatch(geometry, rows, 7), build(ReferenceAttention, geometry)
    assert len(backend.plan(batch.batch).pieces.ends) > 4
    check(batch, backend, layer_params(), lse=True)
    check(batch, backend, layer_params(window=9))


def test_random_batches():
    rng = np.random.default_rng()
    seed = int(rng.integers(1 << 30))
    print("seed", seed)
    rng = np.random.default_rng(seed)
    for _ in range(6):
        lengths = rng.integers(1, 60, size=rng.integers(1, 12))
        rows = [(int(rng.choice([1, min(4, n), n])), int(n)) for n in lengths]
        geometry = Geometry(block_size=int(rng.integers(1, 20)))
        batch = PagedBatch(geometry, rows, seed, Placement(padding=int(rng.integers(3))))
        check(batch, build(ReferenceAttention, geometry), layer_params(), lse=True)


def test_pieces_cover_every_query_token_once():
    queries, keys = [1, 300, 0, 513, 7], [900, 300, 4, 70_000, 7]
    pieces = cut_pieces(queries, keys, (1000, 64), 256 << 20)
    tokens = np.concatenate(
        [np.arange(t, t + n) for t, n in zip(pieces.token, pieces.length, strict=True)]
    )
    assert sorted(tokens) == list(range(sum(queries)))
    assert (pieces.padded >= pieces.length).all()
    assert pieces.ends[-1] == len(pieces.row)
    # A long context has smaller pieces, so that the scores of one stay bounded.
    assert pieces.length[pieces.row == 3].max() == 16
    assert pieces.length[pieces.row == 1].max() == 256


def test_decode_step_is_one_chunk():
    pieces = cut_pieces([1] * 64, [500] * 64, (1000, 64), 256 << 20)
    assert pieces.ends == [64]


def test_refusals_have_reasons():
    need = Geometry().need
    assert ReferenceAttention.accepts(need, DEVICE)
    for change, reason in (
        ({"kind": "mla"}, "mla"),
        ({"kv_dtype": "float8_e4m3"}, "float8_e4m3 is not among float32, bfloat16, float16, int8"),
        ({"num_heads": 5}, "multiple"),
        ({"tree_mask": True}, "tree"),
        ({"captured": True}, "captured"),
    ):
        verdict = ReferenceAttention.accepts(replace(need, **change), DEVICE)
        assert reason in " ".join(verdict.reasons)
    full = replace(need, softcap=True, sinks=True, alibi=True, lse=True, windows=frozenset({4}))
    assert ReferenceAttention.accepts(full, DEVICE)


def test_what_cannot_be_honoured_is_an_error():
    geometry = Geometry()
    batch, backend = PagedBatch(geometry, [(1, 2)]), build(ReferenceAttention, geometry)
    with pytest.raises(UnsupportedError, match="scaled"):
        batch.run(backend, LayerParams(scale=1.0, k_scale=torch.ones(1)))
    batch.batch.features = frozenset({"tree_mask"})
    with pytest.raises(UnsupportedError, match="tree_mask"):
        backend.plan(batch.batch)
    with pytest.raises(UnsupportedError, match="no int8 cache with scales of 0 bytes"):
        ReferenceAttention(replace(geometry.spec, dtype="int8"), KVLayout(), None)
    with pytest.raises(UnsupportedError, match="layout"):
        ReferenceAttention(geometry.spec, KVLayout(order=(0, 1, 2, 3, 4)), None)
