"""The paged attention of TPUs, interpreted, against the formula in float64."""

from dataclasses import replace
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from paged_cases import PagedCase, Shape, run_once

from cardan.platforms.tpu.pallas.paged_attention import paged_attention

PLAIN = Shape()
PADDING = (0, 0, 0)
# Contexts that end at borders of blocks (16) and of chunks (up to 512 keys), and beside them.
DECODE = [(0, 0, 1), (1, 15, 1), (2, 16, 1), (3, 300, 1), (4, 511, 1), (5, 512, 1), (6, 1100, 1)]
# Row 0 in two pieces, the second of which follows the first in the same step.
PREFILL = [(0, 0, 24), (0, 24, 9), (1, 40, 24), (2, 0, 1), (3, 503, 20)]
MIXED = [PADDING, (0, 33, 1), (1, 7, 10), PADDING, PADDING, (2, 0, 24), (3, 127, 1), PADDING]
FORMS = {"decode": (DECODE, 1), "prefill": (PREFILL, 24), "mixed": (MIXED, 24)}
# Results, weighted means of values about 1, keep 24 bits; sums are of up to 1100 terms.
EXACT = 1e-5
# bfloat16 keeps 8 bits: the weights lose 2**-9 of theirs, about evenly, and the result of up to
# about 4 as much of it: 4 * 2**-9 = 8e-3, and half of it more for what the weights lost.
ROUNDED = 1.2e-2


def check(case, interpret=True, softcap=None, tolerance=EXACT):
    scale = case.shape.head_dim**-0.5
    options = {"scale": scale, "window": case.window, "softcap": softcap, "interpret": interpret}
    found = run_once(partial(paged_attention, **options), *case.arguments())
    assert found.shape == case.queries.shape
    assert found.dtype == case.shape.dtype
    found = np.array(found, np.float64)
    assert np.isfinite(found).all()
    error = np.abs(found - case.truth(scale, softcap))[case.is_query()]
    assert error.max(initial=0) < tolerance


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("pieces", "num_queries"), FORMS.values(), ids=FORMS)
def test_pieces(pieces, num_queries, dtype):
    shape = replace(PLAIN, dtype=dtype)
    tolerance = EXACT if dtype == jnp.float32 else ROUNDED
    check(PagedCase(shape, pieces, num_queries, seed=1), tolerance=tolerance)


@pytest.mark.parametrize(("form", "window"), [("decode", 1), ("decode", 100), ("prefill", 16)])
def test_windows(form, window):
    pieces, num_queries = FORMS[form]
    check(PagedCase(PLAIN, pieces, num_queries, seed=2, window=window))


@pytest.mark.parametrize(("softcap", "window"), [(0.7, None), (30.0, 9)])
def test_softcap(softcap, window):
    check(PagedCase(PLAIN, MIXED, 24, seed=3, window=window), softcap=softcap)


@pytest.mark.parametrize(
    "changes",
    [
        {"heads": 9, "kv_heads": 3, "head_dim": 128},
        {"heads": 2, "kv_heads": 2, "block_size": 256},
        {"heads": 7, "kv_heads": 1, "head_dim": 256, "block_size": 8},
        {"heads": 16, "kv_heads": 2, "block_size": 32},
    ],
    ids=str,
)
def test_shapes(changes):
    check(PagedCase(replace(PLAIN, **changes), MIXED, 24, seed=5))


@pytest.mark.parametrize(
    ("form", "changes", "window"),
    [
        ("decode", {"heads": 9, "kv_heads": 3, "dtype": jnp.bfloat16}, 17),
        ("prefill", {"block_size": 32}, None),
        ("mixed", {"head_dim": 32, "places": 4, "block_size": 32, "heads": 6}, 3),
    ],
    ids=str,
)
def test_tokens_in_one_row(form, changes, window):
    shape = replace(PLAIN, **{"places": 2, **changes})
    tolerance = EXACT if shape.dtype == jnp.float32 else ROUNDED
    pieces, num_queries = FORMS[form]
    check(PagedCase(shape, pieces, num_queries, seed=11, window=window), tolerance=tolerance)


def test_full_pieces():
    """So many query heads that key heads are spread over several steps."""
    shape = Shape(heads=32, kv_heads=8, head_dim=128, dtype=jnp.bfloat16)
    check(PagedCase(shape, [(0, 130, 128), PADDING], 128, seed=6), tolerance=ROUNDED)


def test_only_padding():
    check(PagedCase(PLAIN, [PADDING, PADDING], 2, seed=8))


@pytest.mark.parametrize(("dtype", "window"), [(jnp.float32, None), (jnp.bfloat16, 20)])
def test_copies(dtype, window, capfd):
    """Copies finish when they are waited for only, and memory begins as no numbers."""
    shape = replace(PLAIN, dtype=dtype, block_size=64, heads=3, kv_heads=1)
    pieces = [PADDING, (0, 600, 1), (1, 63, 1), PADDING, (2, 10, 4)]
    case = PagedCase(shape, pieces, 4, seed=9, window=window)
    strict = pltpu.InterpretParams(dma_execution_mode="on_wait", detect_races=True)
    check(case, interpret=strict, tolerance=EXACT if dtype == jnp.float32 else ROUNDED)
    assert "RACE" not in "".join(capfd.readouterr())


def test_copies_over_steps():
    """Pieces of several steps: each begins with the half where the last one ended."""
    shape = Shape(heads=12, kv_heads=12, head_dim=64, block_size=64, places=2)
    case = PagedCase(shape, [(0, 70, 1), (1, 600, 1)], 1, seed=10)
    check(case, interpret=pltpu.InterpretParams())
