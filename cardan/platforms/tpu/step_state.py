"""What lives on the device from step to step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch

from cardan.core.types.kv import KVCacheSpec
from cardan.platforms.tpu.attention import PagedKernels
from cardan.platforms.tpu.host_tensors import jax_dtype
from cardan.platforms.tpu.placement import Placement


class StepState(NamedTuple):
    """What lives on the device from step to step; a program takes it and gives the next one.

    ``caches``: of each layer, as ``PagedKernels`` has them; ``history``
    [rows + 1, max_len] int32: the tokens of each permanent row, the last of which is nobody's.
    """

    caches: list[jax.Array]
    history: jax.Array

    @property
    def is_lost(self) -> bool:
        """Whether a program has used it up."""
        return any(array.is_deleted() for array in (*self.caches, self.history))


@dataclass(frozen=True, slots=True)
class ProgramSizes:
    """``max_len`` tokens of a row, ``num_rows`` permanent rows without the one of nobody."""

    block_size: int
    vocab_size: int
    num_rows: int
    max_len: int


def abstract_state(
    specs: Sequence[KVCacheSpec],
    kernels: PagedKernels,
    placement: Placement,
    sizes: ProgramSizes,
    num_blocks: int,
) -> Any:
    """Shapes, dtypes and places of a ``StepState`` with caches of ``num_blocks``; holds nothing."""
    caches = []
    for spec in specs:
        shape = kernels.cache_shape(spec, num_blocks)
        dtype = jax_dtype(getattr(torch, spec.dtype))
        places = placement.split_on(2, shape)
        caches.append(jax.ShapeDtypeStruct(shape, dtype, sharding=places))
    history = (sizes.num_rows + 1, sizes.max_len)
    return StepState(
        caches,
        jax.ShapeDtypeStruct(history, jnp.int32, sharding=placement.whole),
    )


def zero_state(
    specs: Sequence[KVCacheSpec],
    kernels: PagedKernels,
    placement: Placement,
    sizes: ProgramSizes,
    num_blocks: int,
) -> StepState:
    """A state whose numbers are all zero."""
    like = abstract_state(specs, kernels, placement, sizes, num_blocks)

    def zeros(array: jax.ShapeDtypeStruct) -> jax.Array:
        make = jax.jit(lambda: jnp.zeros(array.shape, array.dtype), out_shardings=array.sharding)
        made: jax.Array = make()
        return made

    return StepState([zeros(cache) for cache in like.caches], zeros(like.history))
