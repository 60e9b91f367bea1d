"""Paged attention of a traced step: what goes where, whoever computes it."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp

from cardan.core.interfaces.attention import LayerParams
from cardan.core.types.kv import KVCacheSpec
from cardan.platforms.tpu.placement import AXIS, Placement
from cardan.platforms.tpu.step_layout import StepLayout
from cardan.platforms.tpu.traced_step import AttentionFunctions

# Of a cache's axes.
_HEAD_AXIS = 2


class PagedKernels(Protocol):
    """Attention over a layer's cache [num_blocks, 2, num_kv_heads, ...], whose further axes are the
    kernels' own.

    Keys are at 0 of the second axis, values at 1; block 0 belongs to nobody.
    """

    def cache_shape(self, spec: KVCacheSpec, num_blocks: int) -> tuple[int, ...]: ...

    def attend(
        self,
        queries: jax.Array,
        cache: jax.Array,
        tables: jax.Array,
        pieces: jax.Array,
        params: LayerParams,
    ) -> jax.Array:
        """queries [P, Q, num_heads, head_dim] -> the same shape, causal within each sequence.

        ``tables`` [R, B] int32 block ids; ``pieces`` [P, 3] int32: row of the table, position of
        the first query, number of queries. What others than these give is finite.
        """

    def write(
        self,
        keys: jax.Array,
        values: jax.Array,
        cache: jax.Array,
        fields: Mapping[str, jax.Array],
    ) -> jax.Array:
        """The cache with keys and values [T, num_kv_heads, head_dim] at the step's slots."""


class CachedAttention(AttentionFunctions):
    """One step's attention. ``caches`` are those of all layers, as they are when it has run."""

    def __init__(
        self,
        caches: list[jax.Array],
        fields: Mapping[str, jax.Array],
        layout: StepLayout,
        kernels: PagedKernels,
    ) -> None:
        self.caches = list(caches)
        self._fields = fields
        self._layout = layout
        self._kernels = kernels

    def write(self, layer: int, keys: jax.Array, values: jax.Array) -> None:
        cache = self.caches[layer]
        keys, values = keys.astype(cache.dtype), values.astype(cache.dtype)
        self.caches[layer] = self._kernels.write(keys, values, cache, self._fields)

    def run(self, layer: int, queries: jax.Array, params: LayerParams) -> jax.Array:
        if not self._layout.shape.has_prompts:
            return self._attend(layer, queries[:, None], "single_pieces", params)[:, 0]
        fields, num_tokens = self._fields, len(queries)
        # Padding goes behind the last token, and is dropped.
        singles = fields["single_tokens"]
        found = jnp.zeros_like(queries)
        answers = self._attend(layer, queries[singles][:, None], "single_pieces", params)
        found = found.at[singles].set(answers[:, 0], mode="drop")
        within = jnp.arange(self._layout.shape.piece_tokens, dtype=jnp.int32)
        tokens = fields["piece_tokens"][:, None] + within
        tokens = jnp.where(within < fields["pieces"][:, 2:], tokens, num_tokens)
        answers = self._attend(layer, queries[tokens], "pieces", params)
        return found.at[tokens].set(answers, mode="drop")

    def _attend(
        self, layer: int, queries: jax.Array, pieces: str, params: LayerParams
    ) -> jax.Array:
        cache, fields = self.caches[layer], self._fields
        return self._kernels.attend(queries, cache, fields["tables"], fields[pieces], params)


class XlaKernels:
    """``PagedKernels`` in plain operations of jax: their definition, and what hosts run.

    The further axes are the tokens of a block, and a head's numbers.
    """

    def cache_shape(self, spec: KVCacheSpec, num_blocks: int) -> tuple[int, ...]:
        return (num_blocks, 2, spec.num_kv_heads, spec.block_size, spec.k_head_dim)

    def attend(
        self,
        queries: jax.Array,
        cache: jax.Array,
        tables: jax.Array,
        pieces: jax.Array,
        params: LayerParams,
    ) -> jax.Array:
        num_pieces, num_queries, _, head_dim = queries.shape
        num_kv_heads = cache.shape[2]
        rows, first = pieces[:, 0], pieces[:, 1]
        gathered = cache[tables[rows]]
        keys, values = (
            jnp.moveaxis(gathered[:, :, half], 2, 1).reshape(
                num_pieces, num_kv_heads, -1, cache.shape[-1]
            )
            for half in (0, 1)
        )
        grouped = queries.reshape(num_pieces, num_queries, num_kv_heads, -1, head_dim)
        scores = jnp.einsum("pqhgd,phkd->phgqk", grouped, keys, preferred_element_type=jnp.float32)
        scores = scores * params.scale
        if params.softcap is not None:
            scores = params.softcap * jnp.tanh(scores / params.softcap)
        position = first[:, None] + jnp.arange(num_queries, dtype=jnp.int32)
        reach = jnp.arange(keys.shape[2], dtype=jnp.int32)
        distance = position[:, :, None] - reach
        visible = distance >= 0
        if params.window is not None:
            visible &= distance < params.window
        scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1)
        # What nobody has written may be no number, which times 0 is none either.
        is_written = reach < (first + pieces[:, 2])[:, None]
        values = jnp.where(is_written[:, None, :, None], values, 0)
        out = jnp.einsum(
            "phgqk,phkd->pqhgd",
            weights.astype(values.dtype),
            values,
            preferred_element_type=jnp.float32,
        )
        return out.reshape(queries.shape).astype(queries.dtype)

    def write(
        self,
        keys: jax.Array,
        values: jax.Array,
        cache: jax.Array,
        fields: Mapping[str, jax.Array],
    ) -> jax.Array:
        slots, block_size = fields["slots"], cache.shape[3]
        blocks = jnp.where(slots < 0, cache.shape[0], slots // block_size)
        places = slots % block_size
        cache = cache.at[blocks, 0, :, places].set(keys, mode="drop")
        return cache.at[blocks, 1, :, places].set(values, mode="drop")


class PallasKernels:
    """``PagedKernels`` of this package, for TPUs.

    Each device of ``placement`` has some of the heads, where they can be cut. ``interpret``: run
    them on any host.
    """

    def __init__(self, block_size: int, placement: Placement, interpret: bool = False) -> None:
        self._block_size = block_size
        self._placement = placement
        self._interpret = interpret

    def cache_shape(self, spec: KVCacheSpec, num_blocks: int) -> tuple[int, ...]:
        from cardan.platforms.tpu.pallas.cache_shape import cache_shape

        sizes = (spec.num_kv_heads, spec.block_size, spec.k_head_dim)
        return cache_shape(num_blocks, *sizes)

    def attend(
        self,
        queries: jax.Array,
        cache: jax.Array,
        tables: jax.Array,
        pieces: jax.Array,
        params: LayerParams,
    ) -> jax.Array:
        from cardan.platforms.tpu.pallas.paged_attention import paged_attention

        attend = partial(
            paged_attention,
            scale=params.scale,
            window=params.window,
            softcap=params.softcap,
            interpret=self._interpret,
        )
        mapped = self._by_heads(attend, cache, (2, _HEAD_AXIS, None, None), 2)
        return mapped(queries, cache, tables, pieces)

    def write(
        self,
        keys: jax.Array,
        values: jax.Array,
        cache: jax.Array,
        fields: Mapping[str, jax.Array],
    ) -> jax.Array:
        from cardan.platforms.tpu.pallas.cache_write import write_cache

        targets, block_size = fields["targets"], self._block_size
        # The token that lies at place 0 of each block, which may be before the step's first.
        first = fields["target_tokens"] - targets[:, 1]
        tokens = first[:, None] + jnp.arange(block_size, dtype=jnp.int32)
        tokens = jnp.clip(tokens, 0, len(keys) - 1)
        new = jnp.moveaxis(jnp.stack([keys[tokens], values[tokens]], axis=1), 3, 2)
        write = partial(write_cache, interpret=self._interpret)
        return self._by_heads(write, cache, (2, _HEAD_AXIS, None), _HEAD_AXIS)(new, cache, targets)

    def _by_heads(
        self,
        kernel: Callable[..., jax.Array],
        cache: jax.Array,
        heads: tuple[int | None, ...],
        out_heads: int,
    ) -> Callable[..., jax.Array]:
        """``kernel`` on each device; ``heads`` are the axes of its arguments that are heads."""
        if self._placement.size == 1:
            return kernel
        is_cut = cache.shape[_HEAD_AXIS] % self._placement.size == 0

        def spec(axis: int | None) -> jax.sharding.PartitionSpec:
            if axis is None or not is_cut:
                return jax.sharding.PartitionSpec()
            return jax.sharding.PartitionSpec(*(None,) * axis, AXIS)

        mapped: Callable[..., jax.Array] = jax.shard_map(
            kernel,
            mesh=self._placement.mesh,
            in_specs=tuple(map(spec, heads)),
            out_specs=spec(out_heads),
            check_vma=False,
        )
        return mapped
