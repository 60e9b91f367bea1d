"""What Triton's kernels write into paged caches, under the interpreter, against the definition."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from triton_interpreter import interpreted, interpreting

from cardan.core.interfaces.attention import HeadRotation
from cardan.core.interfaces.capabilities import Capabilities, DeviceInfo
from cardan.core.interfaces.torch_device import TorchDevice
from cardan.core.interfaces.torch_kv_content import loaded_content, stored_content
from cardan.core.ops.reference.norm import rms_norm
from cardan.core.ops.reference.rope import rotary_embedding
from cardan.testing.conformance.paged_batches import (
    Geometry,
    PagedBatch,
    Placement,
    as_bits,
    logical_cache,
)

INFO = DeviceInfo(platform="test", index=0, name="test", arch="sm_90")
PLAIN = Geometry(heads=4, kv_heads=2, k_dim=32, v_dim=32, block_size=16)
ROWS = [(1, 40), (5, 5), (3, 20)]
# All but float32 in bfloat16, which the interpreter cuts off and GPUs round.
WRITES = [("float32", cache) for cache in ("float32", "float16", "int8", "float8_e4m3")]
WRITES += [("bfloat16", cache) for cache in ("float32", "bfloat16", "float16", "int8")]
WRITES += [("bfloat16", "float8_e4m3"), ("float16", "int8"), ("float16", "float8_e4m3")]


def built(geometry):
    capabilities = Capabilities(instruction_sets=("tile_copies",))
    device = TorchDevice(INFO, capabilities, "cpu", lambda: None)
    attention = interpreted("attention").TritonAttention
    return attention(geometry.spec, attention.layout(geometry.spec, INFO), device)


def contents(batch):
    """Keys and values of the step's tokens as they lie in the cache, [T, 2, heads, content]."""
    size = batch.geometry.block_size
    slots = batch.batch.slot_mapping[: batch.num_query_tokens]
    logical = as_bits(logical_cache(batch.cache, batch.placement.layout))
    return logical[slots // size, :, :, slots % size].view(batch.cache.dtype)


def hostile(shape, dtype, generator):
    """Numbers of all sizes, some of which are none."""
    x = torch.randn(shape, generator=generator)
    x *= torch.logspace(-6, 3.5, shape[0])[:, None, None]
    x[0, 0] = 0.0
    x[1, 0, 3], x[1, 1, 0] = torch.nan, torch.inf
    x[2, 0, :4] = torch.tensor([448.0, 464.0, -1e4, 2.0**-9])
    x[3, 0, :3] = torch.tensor([2.0**-10, 3 * 2.0**-11, -0.0])
    x[4, 0] = 127.0
    x[4, 1, :4] = torch.tensor([0.5, 1.5, 2.5, 127.0])
    return x.to(dtype)


@pytest.mark.parametrize(("dtype", "kv_dtype"), WRITES)
def test_written_bits_are_those_of_torch(dtype, kv_dtype):
    geometry = replace(PLAIN, dtype=dtype, kv_dtype=kv_dtype, k_dim=20, v_dim=36, kv_heads=3)
    batch = PagedBatch(geometry, ROWS, 5, Placement(padding=4))
    generator = torch.Generator().manual_seed(7)
    tokens = batch.batch.num_tokens
    k = hostile((tokens, 3, 20), geometry.torch_dtype, generator)
    v = hostile((tokens, 3, 36), geometry.torch_dtype, generator)
    before = as_bits(logical_cache(batch.cache, batch.placement.layout)).clone()
    backend = built(geometry)
    with interpreting():
        backend.write(k, v, batch.cache, backend.plan(batch.batch))
    found, count = contents(batch), batch.num_query_tokens
    for place, (part, dim) in enumerate(((k, 20), (v, 36))):
        want = stored_content(part[:count], geometry.spec, batch.cache.dtype)
        got = found[:, place].contiguous()
        for numbers in (got, want):
            assert numbers.dtype == batch.cache.dtype
        np.testing.assert_array_equal(
            as_bits(got)[..., :dim].float().numpy(), as_bits(want)[..., :dim].float().numpy()
        )
        np.testing.assert_array_equal(
            loaded_content(got, dim, geometry.spec).float().numpy(),
            loaded_content(want.contiguous(), dim, geometry.spec).float().numpy(),
        )
    after = as_bits(logical_cache(batch.cache, batch.placement.layout)).clone()
    slots = batch.batch.slot_mapping[:count]
    for cache in (before, after):
        cache[slots // 16, :, :, slots % 16] = 0
    assert torch.equal(before.nan_to_num(7.0), after.nan_to_num(7.0))


def rotation_of(geometry, normed, width, provider=None):
    """Of the first ``width`` elements, and as a function in float64 that rounds as often."""
    generator = torch.Generator().manual_seed(11)
    angles = torch.rand(64, width // 2, generator=generator) * 6
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1)
    weights = [torch.rand(geometry.k_dim, generator=generator) + 0.5 for _ in range(2)]
    rotation = interpreted("rotation")

    def rotate(q, k, positions):
        if normed:
            return rotation.qk_norm_rope(q, k, *weights, 1e-5, cos_sin, positions)
        return rotation.rotary_embedding(q, k, cos_sin, positions)

    def truth(heads, weight, positions):
        wide = heads.double()
        wide = rms_norm(wide, weight.double(), 1e-5) if normed else wide
        return rotary_embedding(wide, wide, cos_sin.double(), positions)[0]

    made = HeadRotation(
        rotate=rotate,
        provider=provider or ("triton.qk_norm_rope" if normed else "triton.rotary_embedding"),
        cos_sin=cos_sin,
        q_weight=weights[0] if normed else None,
        k_weight=weights[1] if normed else None,
        eps=1e-5,
    )
    return made, lambda q, k, at: (truth(q, weights[0], at), truth(k, weights[1], at))


def wide_parts(batch):
    """Queries, keys and values as parts of one tensor, as a fused projection makes them."""
    parts = [batch.packed(part) for part in (batch.queries, batch.keys, batch.values)]
    return torch.cat(parts, 1).split([part.shape[1] for part in parts], 1)


@pytest.mark.parametrize(
    ("changes", "normed", "width"),
    [
        ({}, True, 32),
        ({"dtype": "bfloat16"}, True, 32),
        ({"heads": 18, "kv_heads": 9}, False, 32),
        ({"kv_dtype": "int8"}, True, 12),
        ({"kv_dtype": "int8", "dtype": "bfloat16"}, False, 32),
        ({"kv_dtype": "float8_e4m3", "k_dim": 24, "v_dim": 24}, True, 24),
        ({"dtype": "float16", "kv_dtype": "float8_e4m3"}, False, 20),
    ],
    ids=str,
)
def test_one_launch_does_what_two_do(changes, normed, width):
    geometry = replace(PLAIN, **changes)
    fused, apart = (PagedBatch(geometry, ROWS, 5, Placement(padding=3)) for _ in range(2))
    rotation, truth = rotation_of(geometry, normed, width)
    backend = built(geometry)
    positions = fused.batch.positions
    with interpreting():
        plan = backend.plan(fused.batch)
        q = backend.rotate_and_write(wide_parts(fused), positions, rotation, fused.cache, plan)
        other_q, k = rotation.rotate(*wide_parts(apart)[:2], positions)
        backend.write(k, wide_parts(apart)[2], apart.cache, plan)
    count = fused.num_query_tokens
    assert torch.equal(q[:count], other_q[:count])
    assert torch.equal(*(batch.cache.view(torch.uint8) for batch in (fused, apart)))
    want, _ = truth(*(part[:count] for part in wide_parts(fused)[:2]), positions[:count])
    tolerance = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}[geometry.dtype]
    np.testing.assert_allclose(q[:count].double(), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_prompts_after_one_launch(kv_dtype):
    """Their rotated keys are read where the launch left them, or from a cache that rounds."""
    geometry = replace(PLAIN, kv_dtype=kv_dtype)
    batches = [PagedBatch(geometry, [(64, 64), (1, 7), (9, 9)], 5) for _ in range(2)]
    rotation, _ = rotation_of(geometry, True, 32)
    backend = built(geometry)
    outs = []
    layer = interpreted("attention").LayerParams(scale=0.2)
    for batch, provider in zip(batches, ("triton.qk_norm_rope", "reference"), strict=True):
        with interpreting():
            plan = backend.plan(batch.batch)
            assert plan.long_rows.is_fresh
            made = replace(rotation, provider=provider)
            q = backend.rotate_and_write(
                wide_parts(batch), batch.batch.positions, made, batch.cache, plan
            )
            assert (plan.long_rows.step_k is not None) == (kv_dtype is None)
            outs.append(backend.run(q, batch.cache, plan, layer))
    assert torch.equal(*outs)


def test_a_pinned_rotation_is_done_by_who_was_pinned():
    batch = PagedBatch(PLAIN, ROWS, 5)
    calls = []
    rotation, _ = rotation_of(PLAIN, True, 32, provider="reference")
    pinned = replace(rotation, rotate=lambda *args: calls.append(1) or rotation.rotate(*args))
    backend = built(PLAIN)
    for made in (rotation, pinned):
        with interpreting():
            backend.rotate_and_write(
                wide_parts(batch),
                batch.batch.positions,
                made,
                batch.cache,
                backend.plan(batch.batch),
            )
    assert calls == [1]


def test_no_tokens():
    batch = PagedBatch(PLAIN, [(0, 3)], 5)
    rotation, _ = rotation_of(PLAIN, True, 32)
    backend = built(PLAIN)
    q = backend.rotate_and_write(
        wide_parts(batch), batch.batch.positions, rotation, batch.cache, backend.plan(batch.batch)
    )
    assert q.shape == (0, 4, 32)
