"""Writes new keys and values into blocks of a paged cache, in place."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from cardan.platforms.tpu.pallas.tiles import LANES, largest_divisor, round_up

# Bytes of vector memory of one operand's block, of which there are six: new, old and result, and
# the next of each.
_BLOCK_BYTES = 1 << 20


def write_cache(new: Array, cache: Array, targets: Array, *, interpret: Any = False) -> Array:
    """The cache with some places of some blocks replaced; the given one is used up.

    ``new`` ``[targets, 2, kv_heads, block_size, head_dim]``, of the dtype of ``cache``
    ``[blocks, 2, kv_heads, block_size / n, n * head_dim]``, n tokens to a row as in
    ``cache_shape``, lies as blocks do, but with a row for each token; ``targets``
    ``[targets, 3]`` int32: block, first place, number of places. These take ``new``, the block's
    others keep what they hold. A block occurs once at most, but for block 0, of no places.
    ``interpret`` is Pallas's: True or its parameters run the kernel without a TPU.
    """
    block_size, head_dim = new.shape[3:]
    _, _, kv_heads, block_rows, row_size = cache.shape
    head_bytes = 2 * block_rows * round_up(row_size, LANES) * cache.dtype.itemsize
    heads = largest_divisor(kv_heads, _BLOCK_BYTES // head_bytes)
    shape = (1, 2, heads, block_rows, row_size)

    def of_new(target: Any, part: Any, _: Any) -> tuple[Any, ...]:
        return target, 0, part, 0, 0

    def of_block(target: Any, part: Any, targets: Any) -> tuple[Any, ...]:
        return targets[3 * target], 0, part, 0, 0

    def of_kept(target: Any, part: Any, targets: Any) -> tuple[Any, ...]:
        """What is replaced entirely need not be read; what is read in a row is read once."""
        is_kept = targets[3 * target + 2] < block_size
        return jnp.where(is_kept, targets[3 * target], 0), 0, jnp.where(is_kept, part, 0), 0, 0

    return pl.pallas_call(
        functools.partial(_kernel, head_dim),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(len(new), kv_heads // heads),
            in_specs=[pl.BlockSpec(shape, of_new), pl.BlockSpec(shape, of_kept)],
            out_specs=pl.BlockSpec(shape, of_block),
        ),
        out_shape=jax.ShapeDtypeStruct(cache.shape, cache.dtype),
        input_output_aliases={2: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary")),
        interpret=interpret,
        name="write_cache",
    )(targets.reshape(-1), new.reshape(-1, *cache.shape[1:]), cache)


def _kernel(head_dim: int, targets: Any, new: Any, kept: Any, out: Any) -> None:
    target = 3 * pl.program_id(0)
    first, count = targets[target + 1], targets[target + 2]
    size = out.shape[1:]
    place = size[-1] // head_dim * lax.broadcasted_iota(jnp.int32, size, 2)
    place += lax.div(lax.broadcasted_iota(jnp.int32, size, 3), head_dim)
    out[0] = jnp.where((place >= first) & (place < first + count), new[0], kept[0])
