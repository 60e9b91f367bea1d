"""Rotation and the write to the cache in one call of native attention: the bits of the two calls,
against float64, recorded, and what it refuses."""

import ctypes
import os
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from attention_provider import MIXED, NATIVE

from cardan.core.interfaces.attention import AttentionBackend, HeadRotation
from cardan.platforms.cpu.native import attention as native
from cardan.platforms.cpu.native.elementwise import ElementwiseKernels
from cardan.platforms.cpu.native.library import library, open_library
from cardan.testing.conformance.attention_truth import error_text
from cardan.testing.conformance.paged_batches import Geometry

build, make = NATIVE.build, NATIVE.make
DTYPES = ("float32", "bfloat16", "float16")
# Table rows: more than any position of a batch.
POSITIONS = 400


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    with torch.inference_mode():
        yield
    torch.set_num_threads(before)


@pytest.fixture(params=["best", "scalar"])
def kernels(request, monkeypatch):
    """The operations apart, of the library that attention's functions are taken from."""
    wanted = {} if request.param == "best" else {"CARDAN_CPU_ISA": request.param}
    found = open_library({**os.environ, **wanted})
    functions = native.bind(found)
    monkeypatch.setattr(native, "_functions", lambda: functions)
    return ElementwiseKernels(found)


def rotation_of(kernels, geometry, normed, width, weight_dtype=None):
    """Of the first ``width`` elements of each head."""
    rng = np.random.default_rng(3)

    def normal(*shape):
        return torch.from_numpy(rng.standard_normal(shape))

    angles = normal(POSITIONS, width // 2)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1).to(torch.float32)
    if not normed:
        return HeadRotation(
            rotate=lambda q, k, positions: kernels.rotary_embedding(q, k, cos_sin, positions),
            provider="cpu.native_rotary_embedding",
            cos_sin=cos_sin,
        )
    weights = [
        (1 + normal(geometry.k_dim) / 4).to(weight_dtype or geometry.torch_dtype) for _ in range(2)
    ]
    return HeadRotation(
        rotate=lambda q, k, positions: kernels.qk_norm_rope(
            q, k, *weights, 1e-5, cos_sin, positions
        ),
        provider="cpu.native_qk_norm_rope",
        cos_sin=cos_sin,
        q_weight=weights[0],
        k_weight=weights[1],
        eps=1e-5,
    )


def heads_of(batch):
    """Queries, keys and values of a step as parts of one tensor where they are of one length."""
    parts = [batch.packed(x) for x in (batch.queries, batch.keys, batch.values)]
    if batch.geometry.k_dim != batch.geometry.v_dim:
        return tuple(parts)
    return torch.cat(parts, dim=1).split([part.shape[1] for part in parts], dim=1)


def exact(heads, weight, rotation, positions):
    """The rotation in float64."""
    x = heads.double()
    if weight is not None:
        x = x / (x.square().mean(-1, keepdim=True) + rotation.eps).sqrt() * weight.double()
    cos, sin = rotation.cos_sin.double()[positions].unsqueeze(1).chunk(2, dim=-1)
    first, second, rest = x.split([cos.shape[-1]] * 2 + [x.shape[-1] - 2 * cos.shape[-1]], dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def both_ways(geometry, rows, rotation):
    """The step done by one call and by the two: batches, queries."""
    found = []
    backend = build(geometry)
    for rotate_and_write in (backend.rotate_and_write, None):
        batch = make(geometry, rows, 4, padding=3)
        args = (heads_of(batch), batch.batch.positions, rotation, batch.cache)
        plan = backend.plan(batch.batch)
        if rotate_and_write is None:
            q = AttentionBackend.rotate_and_write(backend, *args, plan)
        else:
            q = rotate_and_write(*args, plan)
        found.append((batch, q))
    return found


def check_both_ways(geometry, rotation, rows=MIXED):
    (one, q), (two, other_q) = both_ways(geometry, rows, rotation)
    count = one.num_query_tokens
    assert q.dtype is geometry.torch_dtype
    assert torch.equal(q[:count], other_q[:count])
    assert torch.equal(one.cache.view(torch.uint8), two.cache.view(torch.uint8))
    want = exact(heads_of(one)[0], rotation.q_weight, rotation, one.batch.positions)
    tolerance = {"float32": 4e-6, "bfloat16": 2e-2, "float16": 3e-3}[geometry.dtype]
    assert not error_text(q[:count], want[:count].numpy(), tolerance)
    return one


@pytest.mark.parametrize("normed", [False, True], ids=["rotated", "normed"])
@pytest.mark.parametrize("kv_dtype", [*DTYPES, "int8"])
def test_bits_are_those_of_two_calls(kernels, kv_dtype, normed):
    """Whole vectors and remainders of them, heads that are rotated in part, values of another
    length, and weights wider than the heads."""
    shapes = ((64, 64, 64), (37, 21, 26), (24, 24, 12))
    for dtype, (k_dim, v_dim, width) in product(DTYPES, shapes):
        geometry = Geometry(k_dim=k_dim, v_dim=v_dim, dtype=dtype, kv_dtype=kv_dtype)
        wide = torch.float32 if width == 12 else None
        # Threads share the first shape's tokens.
        rows = MIXED if width == 64 else MIXED[:4]
        check_both_ways(geometry, rotation_of(kernels, geometry, normed, width, wide), rows)


def test_keys_in_the_cache_against_float64(kernels):
    geometry = Geometry(k_dim=32, v_dim=32)
    rotation = rotation_of(kernels, geometry, True, 32)
    batch = check_both_ways(geometry, rotation)
    slots, size = batch.batch.slot_mapping[: batch.num_query_tokens], geometry.block_size
    held = batch.cache.movedim(3, 1)[slots // size, slots % size]
    want = exact(heads_of(batch)[1], rotation.k_weight, rotation, batch.batch.positions)
    assert not error_text(held[:, 0], want[: len(slots)].numpy(), 4e-6)
    assert torch.equal(held[:, 1], batch.packed(batch.values)[: len(slots)])


def test_bits_do_not_depend_on_batch_chunks_or_threads(kernels):
    """A prompt whole and in parts, alone and beside other rows."""
    geometry = Geometry(k_dim=48, v_dim=48, dtype="bfloat16", kv_dtype="int8")
    rotation = rotation_of(kernels, geometry, True, 48)
    backend = build(geometry)
    batch = make(geometry, [(300, 300)], 4)
    q, k, v = heads_of(batch)
    positions, seen = batch.batch.positions, batch.batch
    whole = backend.rotate_and_write((q, k, v), positions, rotation, batch.cache, plan_of(batch))
    first = batch.cache.clone()
    batch.cache.zero_()
    torch.set_num_threads(1)
    for begin, end in ((0, 1), (1, 130), (130, 300)):
        part = slice(begin, end)
        view = replace(
            seen,
            query_start_loc=torch.tensor([0, end - begin]),
            positions=positions[part],
            slot_mapping=seen.slot_mapping[part],
        )
        chunk = (q[part], k[part], v[part])
        args = (chunk, positions[part], rotation, batch.cache, backend.plan(view))
        assert torch.equal(backend.rotate_and_write(*args), whole[part])
    written = seen.slot_mapping // geometry.block_size
    assert torch.equal(batch.cache[written.unique()], first[written.unique()])


def plan_of(batch):
    return build(batch.geometry).plan(batch.batch)


def test_one_recorded_call_serves_later_steps():
    geometry = Geometry(dtype="bfloat16")
    rotation = rotation_of(ElementwiseKernels(library()), geometry, True, 16)
    backend = build(geometry)
    batch = make(geometry, [(1, 9), (1, 30)], 4)
    heads, positions = heads_of(batch), batch.batch.positions
    plan = backend.plan(batch.batch)
    with library().recorder.record():
        q = backend.rotate_and_write(heads, positions, rotation, batch.cache, plan)
        calls = library().recorder.take()
    assert len(calls) == 1
    run = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p)(calls[0].address)
    heads[0].normal_()
    heads[1].normal_()
    positions.add_(3)
    assert run(calls[0].fields) == 0
    cache = batch.cache.clone()
    want = AttentionBackend.rotate_and_write(backend, heads, positions, rotation, cache, plan)
    assert torch.equal(q, want)
    assert torch.equal(cache.view(torch.uint8), batch.cache.view(torch.uint8))
    positions[1] = POSITIONS
    assert run(calls[0].fields) == 5


def test_rotations_of_others_are_theirs():
    """Of a package that the user preferred, or of the definition."""
    geometry = Geometry()
    batch = make(geometry, MIXED)
    ours = rotation_of(ElementwiseKernels(library()), geometry, False, 16)
    asked = []
    theirs = replace(
        ours, provider="reference", rotate=lambda *args: asked.append(1) or ours.rotate(*args)
    )
    backend = build(geometry)
    args = (batch.cache, backend.plan(batch.batch))
    for rotation in (ours, theirs):
        backend.rotate_and_write(heads_of(batch), batch.batch.positions, rotation, *args)
    assert asked == [1]


def test_refused_steps_leave_the_cache_alone():
    geometry = Geometry()
    batch = make(geometry, [(1, 9), (12, 30)])
    rotation = rotation_of(ElementwiseKernels(library()), geometry, False, 16)
    backend, before = build(geometry), batch.cache.clone()
    plan = backend.plan(batch.batch)
    q, k, v = heads_of(batch)
    far = batch.batch.positions.clone()
    far[-1] = POSITIONS
    wrong = [
        ((q, k, v), far, IndexError, rf"positions must lie in \[0, {POSITIONS}\)"),
        ((q, k.half(), v), None, ValueError, r"k and v must have one dtype"),
        ((q.half(), k, v), None, ValueError, r"must agree in tokens, dtype and head dim"),
        ((q, k[:, :1], v), None, ValueError, r"k \(13, 1, 16\) and v \(13, 2, 16\) must be"),
        ((q[:-1], k, v), None, ValueError, r"must agree in tokens"),
        ((q, k, v), batch.batch.positions.int(), ValueError, r"positions must be int64 \(13,\)"),
    ]
    for heads, positions, kind, message in wrong:
        places = batch.batch.positions if positions is None else positions
        with pytest.raises(kind, match=message):
            backend.rotate_and_write(heads, places, rotation, batch.cache, plan)
    assert torch.equal(before.view(torch.uint8), batch.cache.view(torch.uint8))
    batch.batch.slot_mapping[-1] = 10**6
    with pytest.raises(IndexError, match="beyond the"):
        backend.rotate_and_write((q, k, v), batch.batch.positions, rotation, batch.cache, plan)


def test_a_step_without_tokens():
    geometry = Geometry()
    batch = make(geometry, [(0, 3)])
    rotation = rotation_of(ElementwiseKernels(library()), geometry, True, 16)
    args = (heads_of(batch), batch.batch.positions, rotation, batch.cache, plan_of(batch))
    assert build(geometry).rotate_and_write(*args).shape == (0, 6, 16)
