"""L3: each attention backend on ragged mixed batches, for each feature that it accepts.

The truth is the formula in float64. Slots that no sequence owns hold NaN.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from cardan.core.types.kv import KV_DTYPES
from cardan.testing.conformance.attention_bench import (
    AttentionBench,
    LayerCase,
    backends_of,
    decode_rows,
    mixed_rows,
)
from cardan.testing.conformance.paged_batches import TORCH_DTYPES, Geometry, PagedBatch
from cardan.testing.conformance.plugin import device_info_of, platform_of
from cardan.testing.conformance.results import not_supported

LEVEL = "L3"

_PLAIN = Geometry(heads=4, kv_heads=2, k_dim=64, v_dim=64, block_size=16)
_HEADS = ((4, 4), (6, 2), (8, 2), (16, 2), (4, 1))
_HEAD_DIMS = ((32, 32), (80, 80), (96, 96), (128, 128), (256, 256), (48, 32), (32, 64))
_BLOCK_SIZES = (1, 8, 32, 64, 128)
_FEATURES: Mapping[str, Mapping[str, object]] = {
    "window 1": {"window": 1},
    "window 5": {"window": 5},
    "window 16": {"window": 16},
    "window beyond all": {"window": 4096},
    "soft cap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "alibi": {"alibi": True},
    "log-sum-exp": {"lse": True},
    "window and soft cap": {"window": 7, "softcap": 2.0},
    "window and sinks": {"window": 7, "sinks": True},
    "all at once": {"window": 9, "softcap": 2.0, "sinks": True, "alibi": True, "lse": True},
}
# Facts of a need that this kit can ask for, but has no batches for.
_UNTESTED: Mapping[str, Mapping[str, object]] = {
    "latent cache (MLA)": {"kind": "mla", "num_kv_heads": 1, "k_head_dim": 576, "v_head_dim": 512},
    "linear attention": {"kind": "linear"},
    "cross attention": {"kind": "cross"},
    "encoder": {"kind": "encoder"},
    "tree masks": {"tree_mask": True},
}


def layer_cases(dtypes: tuple[str, ...], kv_dtypes: tuple[str, ...]) -> dict[str, LayerCase]:
    """Everything to ask of a backend, by name; the first dtype carries all that is not dtypes.

    ``kv_dtypes``: of caches, beside those that every platform has a backend for.
    """
    plain = replace(_PLAIN, dtype=dtypes[0])
    geometries = {f"{dtype}": replace(plain, dtype=dtype) for dtype in dtypes}
    for kv_dtype in dict.fromkeys((*KV_DTYPES, *kv_dtypes)):
        if kv_dtype in TORCH_DTYPES and kv_dtype != plain.dtype:
            geometries[f"cache in {kv_dtype}"] = replace(plain, kv_dtype=kv_dtype)
    for heads, kv_heads in _HEADS:
        geometries[f"{heads} heads on {kv_heads}"] = replace(
            plain, heads=heads, kv_heads=kv_heads, k_dim=64
        )
    for k_dim, v_dim in _HEAD_DIMS:
        name = f"head dim {k_dim}" if k_dim == v_dim else f"head dims {k_dim} and {v_dim}"
        geometries[name] = replace(plain, k_dim=k_dim, v_dim=v_dim)
    for size in _BLOCK_SIZES:
        geometries[f"block size {size}"] = replace(plain, block_size=size)
    cases = {name: LayerCase(geometry=geometry) for name, geometry in geometries.items()}
    for name, features in _FEATURES.items():
        cases[name] = replace(LayerCase(geometry=plain), **features)  # type: ignore[arg-type]
    sliding = replace(plain, kind="sliding_window", window=6)
    cases["sliding-window cache"] = LayerCase(geometry=sliding, window=6)
    return cases


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each backend with each layer case, known without opening the device."""
    if "backend" not in metafunc.fixturenames:
        return
    platform, info = platform_of(metafunc.config), device_info_of(metafunc.config)
    metafunc.parametrize("backend", backends_of(platform, info), ids=lambda item: str(item.name))
    if "case" in metafunc.fixturenames:
        capabilities = platform.capabilities(info)
        dtypes = tuple(dtype for dtype in capabilities.dtypes if dtype in TORCH_DTYPES)
        cases = layer_cases(dtypes or ("float32",), capabilities.kv_dtypes)
        metafunc.parametrize("case", cases.values(), ids=[name.replace(" ", "_") for name in cases])


def test_agrees_with_formula(
    bench: AttentionBench, case: LayerCase, cardan_rng: np.random.Generator
) -> None:
    """Mixed and decode-only steps give what the formula gives."""
    verdict = bench.accepts(case.need)
    if not verdict:
        not_supported(f"{bench.backend.name}: {'; '.join(verdict.reasons)}")
    geometry = case.geometry
    placement = bench.placement(geometry, order=1, padding=2, drop_before=geometry.window)
    for rows in (
        mixed_rows(cardan_rng, min(geometry.block_size, 32)),
        decode_rows(cardan_rng, min(geometry.block_size, 32)),
    ):
        batch = PagedBatch(geometry, rows, int(cardan_rng.integers(2**31)), placement)
        layer = case.layer(bench.torch_device, cardan_rng)
        fault = bench.fault(batch, layer, case.lse)
        if fault:
            pytest.fail(f"{bench.backend.name} on rows {rows}: {fault}", pytrace=False)


@pytest.mark.parametrize("asked", _UNTESTED.values(), ids=[n.replace(" ", "_") for n in _UNTESTED])
def test_answers_other_needs(bench: AttentionBench, asked: Mapping[str, object]) -> None:
    """What the backend does not do is refused with a reason."""
    verdict = bench.accepts(replace(_PLAIN.need, **asked))  # type: ignore[arg-type]
    if verdict:
        not_supported(f"{bench.backend.name} takes {asked}, which this kit has no batches for")
    assert all(reason.strip() for reason in verdict.reasons), "a refusal needs a reason"
    not_supported(f"{bench.backend.name}: {'; '.join(verdict.reasons)}")
