"""L3: what must not matter (where blocks lie, what lies beside them) and what must (each write)."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from cardan.core.interfaces.attention import LayerParams
from cardan.core.interfaces.capabilities import Capabilities, Verdict
from cardan.core.interfaces.errors import UnsupportedError
from cardan.core.interfaces.memory import KVPool
from cardan.core.types.kv import NULL_BLOCK, KVCacheGroup
from cardan.testing.conformance.attention_bench import (
    AttentionBench,
    backends_of,
    mixed_rows,
)
from cardan.testing.conformance.attention_truth import TOLERANCE, error_text
from cardan.testing.conformance.op_cases import same_bits
from cardan.testing.conformance.paged_batches import Geometry, PagedBatch, logical_cache
from cardan.testing.conformance.paged_steps import PagedSteps
from cardan.testing.conformance.plugin import device_info_of, platform_of
from cardan.testing.conformance.results import not_supported

LEVEL = "L3"

_STEPS = 12


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each backend, known without opening the device."""
    if "backend" in metafunc.fixturenames:
        backends = backends_of(platform_of(metafunc.config), device_info_of(metafunc.config))
        metafunc.parametrize("backend", backends, ids=lambda item: str(item.name))


@pytest.fixture
def geometry(bench: AttentionBench) -> Geometry:
    """Sizes that the backend takes."""
    found = bench.usual_geometry()
    if isinstance(found, Verdict):
        not_supported(f"{bench.backend.name}: {'; '.join(found.reasons)}")
    return found


@pytest.fixture
def layer(geometry: Geometry) -> LayerParams:
    return LayerParams(scale=geometry.k_dim**-0.5)


def make_batch(
    bench: AttentionBench, geometry: Geometry, rng: np.random.Generator, **changes: Any
) -> PagedBatch:
    """A mixed batch; ``changes`` of its placement."""
    rows = mixed_rows(rng, min(geometry.block_size, 32))
    placement = bench.placement(geometry, **changes)
    return PagedBatch(geometry, rows, int(rng.integers(2**31)), placement)


def expect(fault: str, bench: AttentionBench, where: str = "") -> None:
    if fault:
        pytest.fail(f"{bench.backend.name}{where}: {fault}", pytrace=False)


def test_placement_of_blocks(
    bench: AttentionBench, geometry: Geometry, layer: LayerParams, cardan_rng: np.random.Generator
) -> None:
    """Where blocks lie in the pool does not matter."""
    rows = mixed_rows(cardan_rng, min(geometry.block_size, 32))
    for order in range(3):
        batch = PagedBatch(geometry, rows, 7, bench.placement(geometry, order=order))
        expect(bench.fault(batch, layer), bench, f", order {order}")


def test_shared_blocks(
    bench: AttentionBench, geometry: Geometry, layer: LayerParams, cardan_rng: np.random.Generator
) -> None:
    """Rows may share the blocks of a common beginning."""
    size = geometry.block_size
    rows = [(1, 2 * size + 1), (3, 2 * size + 3), (size, 4 * size), (1, 5 * size)]
    placement = bench.placement(geometry, order=1, shared=2)
    batch = PagedBatch(geometry, rows, int(cardan_rng.integers(2**31)), placement)
    expect(bench.fault(batch, layer), bench)


def test_parts_of_wider_tensors(
    bench: AttentionBench, geometry: Geometry, layer: LayerParams, cardan_rng: np.random.Generator
) -> None:
    """Queries, keys and values may be views of one fused projection."""
    batch = make_batch(bench, geometry, cardan_rng)
    parts = [batch.packed(part) for part in (batch.queries, batch.keys, batch.values)]
    heads = [geometry.heads, geometry.kv_heads, geometry.kv_heads]
    q, k, v = torch.cat(parts, dim=1).split(heads, dim=1)
    backend = bench.build(geometry, batch.placement.layout)
    with bench.device.inference():
        plan = backend.plan(batch.batch)
        backend.write(k, v, batch.cache, plan)
        out = backend.run(q, batch.cache, plan, layer)
    bench.device.synchronize()
    out = out[: batch.num_query_tokens]
    expect(error_text(out, batch.truth(layer)[0], TOLERANCE[geometry.dtype]), bench)


def test_layers_of_one_plan(
    bench: AttentionBench, geometry: Geometry, cardan_rng: np.random.Generator
) -> None:
    """Layers that differ in scale and window run on one plan, each on its own cache."""
    windows: list[int | None] = [None]
    if bench.accepts(replace(geometry.need, windows=frozenset({3, 20}))):
        windows = [None, 3, None, 20, 3]
    placement = bench.placement(geometry, order=2)
    rows = mixed_rows(cardan_rng, min(geometry.block_size, 32))
    batches = [
        PagedBatch(geometry, rows, int(cardan_rng.integers(2**31)), placement) for _ in windows
    ]
    layers = [
        LayerParams(scale=geometry.k_dim**-0.5 / (1 + place), window=window)
        for place, window in enumerate(windows)
    ]
    backend = bench.build(geometry, placement.layout)
    outs = []
    with bench.device.inference():
        plan = backend.plan(batches[0].batch)
        for batch, layer in zip(batches, layers, strict=True):
            keys, values = batch.packed(batch.keys), batch.packed(batch.values)
            backend.write(keys, values, batch.cache, plan)
            outs.append(backend.run(batch.packed(batch.queries), batch.cache, plan, layer))
    bench.device.synchronize()
    for out, batch, layer in zip(outs, batches, layers, strict=True):
        fault = error_text(
            out[: batch.num_query_tokens], batch.truth(layer)[0], TOLERANCE[geometry.dtype]
        )
        expect(fault, bench, f", window {layer.window}")


@pytest.mark.parametrize(("padding", "kv_dtype"), [(0, None), (3, None), (3, "int8")])
def test_steps(
    bench: AttentionBench,
    geometry: Geometry,
    layer: LayerParams,
    padding: int,
    kv_dtype: str | None,
    cardan_rng: np.random.Generator,
) -> None:
    """What one step writes, later steps read; tables change in place; blocks are used again."""
    geometry = replace(geometry, kv_dtype=kv_dtype)
    verdict = bench.accepts(geometry.need)
    if not verdict:
        not_supported(f"{bench.backend.name}: {'; '.join(verdict.reasons)}")
    placement = bench.placement(geometry, padding=padding)
    steps = PagedSteps(geometry, 4, cardan_rng, placement)
    backend = bench.build(geometry, placement.layout)
    cache = steps.new_cache()
    for step in range(_STEPS):
        view = steps.begin()
        q, k, v = steps.inputs()
        with bench.device.inference():
            plan = backend.plan(view)
            backend.write(k, v, cache, plan)
            out = backend.run(q, cache, plan, layer)
        bench.device.synchronize()
        want = steps.finish(layer)
        fault = error_text(out[: len(want)], want, TOLERANCE[geometry.dtype])
        expect(fault, bench, f", step {step}, rows {view.query_lens} of {view.seq_lens_host}")


def test_pool_of_device(
    bench: AttentionBench, geometry: Geometry, layer: LayerParams, cardan_rng: np.random.Generator
) -> None:
    """The device's own pool, as fresh from its allocator, serves two layers."""
    placement = bench.placement(geometry)
    steps = PagedSteps(geometry, 3, cardan_rng, placement)
    group = KVCacheGroup((0, 1), geometry.spec)
    pool = bench.device.memory.kv_pool(group, placement.layout, steps.num_blocks)
    backend = bench.build(geometry, placement.layout)
    caches = [_view_of(pool, slot) for slot in range(2)]
    for step in range(4):
        view = steps.begin()
        q, k, v = steps.inputs()
        with bench.device.inference():
            plan = backend.plan(view)
            backend.write(k, v, caches[0], plan)
            # The second layer sees other keys in the same slots.
            backend.write(-k, v, caches[1], plan)
            outs = [
                backend.run(q, caches[0], plan, layer),
                backend.run(-q, caches[1], plan, layer),
            ]
        bench.device.synchronize()
        want = steps.finish(layer)
        for slot, out in enumerate(outs):
            fault = error_text(out[: len(want)], want, TOLERANCE[geometry.dtype])
            expect(fault, bench, f", step {step}, layer {slot}")


def test_padding_writes_nothing(
    bench: AttentionBench, geometry: Geometry, layer: LayerParams, cardan_rng: np.random.Generator
) -> None:
    """A step writes its own slots; padding tokens touch nothing but the null block."""
    batch = make_batch(bench, geometry, cardan_rng, padding=5)
    before = logical_cache(batch.cache, batch.placement.layout).cpu().clone()
    bench.run(batch, layer)
    after = logical_cache(batch.cache, batch.placement.layout).cpu().clone()
    slots = batch.batch.slot_mapping.cpu()
    slots = slots[slots >= 0]
    blocks, offsets = slots // geometry.block_size, slots % geometry.block_size
    for kept in (before, after):
        kept[NULL_BLOCK] = 0
        kept[blocks, :, :, offsets] = 0
    changed = [b for b in range(len(before)) if not same_bits(before[b], after[b])]
    assert not changed, f"{bench.backend.name}: blocks {changed} were written beside the slots"


def test_equal_bits(
    bench: AttentionBench,
    geometry: Geometry,
    layer: LayerParams,
    cardan_capabilities: Capabilities,
    cardan_rng: np.random.Generator,
) -> None:
    """Runs of one step give equal bits."""
    if cardan_capabilities.determinism == "none":
        not_supported("the platform promises no equal bits (determinism none)")
    batch = make_batch(bench, geometry, cardan_rng)
    outs = [bench.run(batch, layer)[0] for _ in range(4)]
    assert all(same_bits(outs[0], out) for out in outs[1:]), f"{bench.backend.name}: runs differ"


def test_equal_bits_alone(
    bench: AttentionBench,
    geometry: Geometry,
    layer: LayerParams,
    cardan_capabilities: Capabilities,
    cardan_rng: np.random.Generator,
) -> None:
    """A row gives the same bits alone and in a batch."""
    if cardan_capabilities.determinism != "batch_invariant":
        not_supported(f"the platform promises determinism {cardan_capabilities.determinism}")
    rows = mixed_rows(cardan_rng, min(geometry.block_size, 32))
    batch = PagedBatch(geometry, rows, 5, bench.placement(geometry))
    together, _ = bench.run(batch, layer)
    # The first row draws the same numbers in a batch of its own.
    alone, _ = bench.run(PagedBatch(geometry, rows[:1], 5, bench.placement(geometry)), layer)
    assert same_bits(alone, together[: rows[0][0]]), f"{bench.backend.name}: row {rows[0]} differs"


def test_no_rows(bench: AttentionBench, geometry: Geometry, layer: LayerParams) -> None:
    """A row without query tokens, and a step of padding alone, are no errors."""
    batch = PagedBatch(geometry, [(0, 3), (2, 5), (0, 0)], 1, bench.placement(geometry, padding=2))
    expect(bench.fault(batch, layer), bench)
    empty = PagedBatch(geometry, [(0, 0)], 1, bench.placement(geometry, padding=3))
    out, _ = bench.run(empty, layer)
    assert out.shape[0] == 0


def _view_of(pool: KVPool, slot: int) -> torch.Tensor:
    try:
        return pool.view(slot)
    except UnsupportedError as error:
        not_supported(str(error))
