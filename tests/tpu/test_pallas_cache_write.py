"""Writing into a paged cache of TPUs, interpreted, against assignments in NumPy."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from paged_cases import run_once

from cardan.platforms.tpu.pallas.cache_write import write_cache

NOTHING = (0, 0, 0)
TARGETS = [NOTHING, (3, 0, 16), (7, 5, 1), (1, 15, 1), (2, 0, 3), NOTHING, NOTHING, (5, 4, 12)]


def check(kv_heads, head_dim, block_size, dtype, targets, interpret=True, places=1):
    rng = np.random.default_rng(kv_heads)
    shape = (2, kv_heads, block_size, head_dim)
    cache = np.array(jnp.asarray(rng.standard_normal((9, *shape)), dtype))
    cache[rng.random(cache.shape) < 0.1] = np.nan
    new = np.array(jnp.asarray(rng.standard_normal((len(targets), *shape)), dtype))
    new[:, :, :, -1] = np.inf
    truth = cache.copy()
    for row, (block, first, count) in enumerate(targets):
        written = slice(first, first + count)
        truth[block, :, :, written] = new[row, :, :, written]
    targets = jnp.array(targets, jnp.int32)
    stored = jnp.array(cache.reshape(9, 2, kv_heads, -1, places * head_dim))
    write = partial(write_cache, interpret=interpret)
    found = run_once(write, jnp.array(new), stored, targets)
    assert found.shape == stored.shape
    assert found.dtype == dtype
    as_bits = f"uint{8 * cache.itemsize}"
    np.testing.assert_array_equal(
        np.array(found).reshape(truth.shape).view(as_bits), truth.view(as_bits)
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(3, 64), (8, 128), (1, 256)])
def test_places(kv_heads, head_dim, dtype):
    check(kv_heads, head_dim, 16, dtype, TARGETS)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("head_dim", "places"), [(64, 2), (32, 4)])
def test_tokens_in_one_row(head_dim, places, dtype):
    check(3, head_dim, 16, dtype, TARGETS, places=places)


def test_parts_of_heads():
    """Blocks too large for one grid step."""
    check(8, 128, 256, jnp.float32, [(2, 0, 256), NOTHING, (1, 100, 77), (8, 255, 1)])


def test_nothing():
    check(2, 64, 16, jnp.float32, [NOTHING, NOTHING])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_strictly(dtype, capfd):
    """Copies finish when they are waited for only, and memory begins as no numbers."""
    strict = pltpu.InterpretParams(detect_races=True)
    check(2, 64, 16, dtype, TARGETS, interpret=strict)
    assert "RACE" not in "".join(capfd.readouterr())
