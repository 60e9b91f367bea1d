"""The kernels of TPUs compile for chips that are not here, within their vector memory.

libtpu lets several processes of a host compile at a time, so workers need not wait for each other.
"""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from topologies import TOPOLOGIES, compile_for

from cardan.platforms.tpu.pallas.cache_shape import cache_shape
from cardan.platforms.tpu.pallas.cache_write import write_cache
from cardan.platforms.tpu.pallas.paged_attention import paged_attention

# Heads, key heads and head size.
MODELS = {"SmolLM2-135M": (9, 3, 64), "Llama-3.1-8B": (32, 8, 128)}
# Pieces and queries of each.
STEPS = {"decode": (64, 1), "prefill": (8, 128)}
# More than vector memory holds, so that no compiler moves the cache there.
NUM_BLOCKS = 20_000

each_chip = pytest.mark.parametrize("chip", TOPOLOGIES)
each_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
each_block_size = pytest.mark.parametrize(
    "block_size", [pytest.param(16, marks=pytest.mark.scheduled), 32]
)


def numbers(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def check(compiled, *arguments):
    """Nothing is held but what ``arguments`` are, and a little: the cache least of all."""
    assert "tpu_custom_call" in compiled.as_text()
    memory = compiled.memory_analysis()
    size = sum(argument.size * argument.dtype.itemsize for argument in arguments)
    assert memory.argument_size_in_bytes < 1.01 * size
    assert memory.temp_size_in_bytes < 0.01 * size
    return memory


@each_chip
@each_model
@each_block_size
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_attention(chip, model, block_size, step):
    (heads, kv_heads, head_dim), (pieces, queries) = model, step
    shapes = [
        numbers(pieces, queries, heads, head_dim),
        numbers(*cache_shape(NUM_BLOCKS, kv_heads, block_size, head_dim)),
        numbers(64, 128, dtype=jnp.int32),
        numbers(pieces, 3, dtype=jnp.int32),
    ]
    check(compile_for(chip, partial(paged_attention, scale=0.1), *shapes), *shapes)


@each_chip
@each_model
@each_block_size
def test_cache_write(chip, model, block_size):
    _, kv_heads, head_dim = model
    cache = numbers(*cache_shape(NUM_BLOCKS, kv_heads, block_size, head_dim))
    new = numbers(64, 2, kv_heads, block_size, head_dim)
    shapes = [new, cache, numbers(64, 3, dtype=jnp.int32)]
    memory = check(compile_for(chip, write_cache, *shapes, donated=(1,)), *shapes)
    assert memory.alias_size_in_bytes >= 2 * cache.size


@each_chip
def test_options(chip):
    """A window, a soft cap and float32, whose products are not rounded."""
    shapes = [
        numbers(4, 16, 8, 256, dtype=jnp.float32),
        numbers(NUM_BLOCKS, 2, 4, 16, 256, dtype=jnp.float32),
        numbers(8, 64, dtype=jnp.int32),
        numbers(4, 3, dtype=jnp.int32),
    ]
    attention = partial(paged_attention, scale=0.1, window=40, softcap=30.0)
    check(compile_for(chip, attention, *shapes), *shapes)


def test_cache_shapes():
    """Two tokens of 64 numbers share a row where that leaves tiles whole; the content is alike."""
    assert cache_shape(9, 3, 16, 64) == (9, 2, 3, 8, 128)
    assert cache_shape(9, 3, 8, 64) == (9, 2, 3, 8, 64)
    assert cache_shape(9, 3, 32, 32) == (9, 2, 3, 8, 128)
    assert cache_shape(9, 3, 16, 80) == (9, 2, 3, 16, 80)
    assert cache_shape(9, 3, 16, 256) == (9, 2, 3, 16, 256)
