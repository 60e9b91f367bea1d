"""Paged caches with poison in all that nobody may read, and what attention over them is."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

POISONS = (np.nan, np.inf, -1e30)


def run_once(function, *arguments):
    """What ``function`` gives, compiled without the optimisations that one run does not repay."""
    options = {"xla_backend_optimization_level": 0}
    return jax.jit(function).lower(*arguments).compile(compiler_options=options)(*arguments)


@dataclass(frozen=True)
class Shape:
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: type = jnp.float32
    # Tokens of a row of the cache.
    places: int = 1


class PagedCase:
    """Sequences in blocks of a cache in random order, with random heads.

    ``pieces`` are (row, position of the first query, number of queries); row r's sequence is as
    long as its pieces say. With ``window``, blocks that no query of a row sees any more are given
    back: the table has block 0 there. All other places hold poison.
    """

    def __init__(self, shape, pieces, num_queries, seed=0, window=None):
        self.shape, self.window = shape, window
        self.pieces = np.array(pieces, np.int32)
        rng = np.random.default_rng(seed)
        rows = 1 + max(row for row, _, _ in pieces)
        self.keys = [self._heads(rng, self._length(row)) for row in range(rows)]
        self.values = [self._heads(rng, self._length(row)) for row in range(rows)]
        size = (len(pieces), num_queries, shape.heads, shape.head_dim)
        self.queries = self._rounded(rng.standard_normal(size))
        self.tables, self.cache = self._fill(rng)

    def _length(self, row):
        return max(position + count for piece, position, count in self.pieces if piece == row)

    def _first_seen(self, row):
        if self.window is None:
            return 0
        first = min(start for piece, start, count in self.pieces if piece == row and count)
        return max(first + 1 - self.window, 0)

    def _rounded(self, numbers):
        return np.array(jnp.asarray(numbers, self.shape.dtype), np.float64)

    def _heads(self, rng, length):
        size = (length, self.shape.kv_heads, self.shape.head_dim)
        return self._rounded(rng.standard_normal(size))

    def _fill(self, rng):
        shape, size = self.shape, self.shape.block_size
        widths = [-(-len(keys) // size) for keys in self.keys]
        num_blocks = 3 + sum(widths)
        free = iter(1 + rng.permutation(num_blocks - 1))
        cache = np.empty((num_blocks, 2, shape.kv_heads, size, shape.head_dim))
        cache[...] = rng.choice(POISONS, cache.shape)
        tables = np.zeros((len(widths), max(*widths, 1) + 1), np.int32)
        for row, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            first = self._first_seen(row)
            for page in range(first // size, widths[row]):
                tables[row, page] = next(free)
            for place in range(first, len(keys)):
                block = cache[tables[row, place // size], :, :, place % size]
                block[0], block[1] = keys[place], values[place]
        return tables, cache

    def arguments(self):
        dtype = self.shape.dtype
        size, head_dim = self.shape.block_size, self.shape.head_dim
        rows = (size // self.shape.places, head_dim * self.shape.places)
        queries = jnp.asarray(self.queries, dtype)
        cache = jnp.asarray(self.cache.reshape(*self.cache.shape[:3], *rows), dtype)
        return queries, cache, jnp.asarray(self.tables), jnp.asarray(self.pieces)

    def truth(self, scale, softcap=None):
        """The formula in float64; zeros for what is no query."""
        out = np.zeros(self.queries.shape)
        group = self.shape.heads // self.shape.kv_heads
        for piece, (row, start, count) in enumerate(self.pieces):
            for query in range(count):
                position = start + query
                first = 0 if self.window is None else max(position + 1 - self.window, 0)
                seen = slice(first, position + 1)
                keys = np.repeat(self.keys[row][seen], group, axis=1)
                values = np.repeat(self.values[row][seen], group, axis=1)
                scores = np.einsum("hd,khd->hk", self.queries[piece, query], keys) * scale
                if softcap is not None:
                    scores = softcap * np.tanh(scores / softcap)
                weights = np.exp(scores - scores.max(axis=1, keepdims=True))
                weights /= weights.sum(axis=1, keepdims=True)
                out[piece, query] = np.einsum("hk,khd->hd", weights, values)
        return out

    def is_query(self):
        return np.arange(self.queries.shape[1]) < self.pieces[:, 2:]
