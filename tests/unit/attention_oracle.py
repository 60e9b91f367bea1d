"""A paged batch with its float64 answer, one sequence and head at a time, in NumPy."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import torch

from cardan.core.interfaces.attention import AttentionNeed, BatchView, KVLayout
from cardan.core.types.kv import KVCacheSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class Geometry:
    """Sizes of one attention layer and its cache."""

    heads: int = 6
    kv_heads: int = 2
    k_dim: int = 16
    v_dim: int = 16
    block_size: int = 4
    dtype: str = "float32"
    kind: str = "full"
    window: int | None = None

    @property
    def spec(self) -> KVCacheSpec:
        return KVCacheSpec(
            kind=self.kind,
            block_size=self.block_size,
            num_kv_heads=self.kv_heads,
            k_head_dim=self.k_dim,
            v_head_dim=self.v_dim,
            dtype=self.dtype,
            window=self.window,
        )

    @property
    def need(self) -> AttentionNeed:
        return AttentionNeed(
            kind="mha",
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            k_head_dim=self.k_dim,
            v_head_dim=self.v_dim,
            dtype=self.dtype,
            kv_dtype=self.dtype,
            block_size=self.block_size,
        )


@dataclass
class PagedBatch:
    """``rows`` are (query tokens, context length) pairs; ``padding`` tokens have slot -1.

    Every slot that no sequence owns holds NaN. Blocks are shuffled over the pool.
    """

    geometry: Geometry
    rows: list[tuple[int, int]]
    seed: int = 0
    padding: int = 0
    drop_before: int | None = None
    rng: np.random.Generator = field(init=False)

    def __post_init__(self):
        g = self.geometry
        self.rng = np.random.default_rng(self.seed)
        self.keys = [self._draw(length, g.kv_heads, g.k_dim) for _, length in self.rows]
        self.values = [self._draw(length, g.kv_heads, g.v_dim) for _, length in self.rows]
        self.queries = [self._draw(count, g.heads, g.k_dim) for count, _ in self.rows]
        self._lay_out()

    def _draw(self, *shape):
        return torch.from_numpy(self.rng.standard_normal(shape)).to(DTYPES[self.geometry.dtype])

    def _lay_out(self):
        g, size = self.geometry, self.geometry.block_size
        counts = [-(-length // size) for _, length in self.rows]
        width = max([*counts, 1]) + 1
        free = list(self.rng.permutation(np.arange(1, sum(counts) + 4)))
        table = np.zeros((len(self.rows), width), dtype=np.int32)
        content = max(g.k_dim, g.v_dim)
        cache = torch.full(
            (sum(counts) + 4, 2, size, g.kv_heads, content), torch.nan, dtype=DTYPES[g.dtype]
        )
        slots, positions, token_rows = [], [], []
        for row, (count, length) in enumerate(self.rows):
            table[row, : counts[row]] = [free.pop() for _ in range(counts[row])]
            for position in range(length):
                block, offset = table[row, position // size], position % size
                if position < length - count:
                    cache[block, 0, offset, :, : g.k_dim] = self.keys[row][position]
                    cache[block, 1, offset, :, : g.v_dim] = self.values[row][position]
                else:
                    slots.append(int(block) * size + offset)
                    positions.append(position)
                    token_rows.append(row)
            self._drop(table, cache, row)
        pad = self.padding
        lens = [count for count, _ in self.rows]
        self.cache = cache
        self.batch = BatchView(
            query_lens=lens,
            seq_lens_host=[length for _, length in self.rows],
            query_start_loc=torch.tensor([0, *np.cumsum(lens)]),
            seq_lens=torch.tensor([length for _, length in self.rows], dtype=torch.int64),
            positions=torch.tensor(positions + [0] * pad, dtype=torch.int64),
            token_rows=torch.tensor(token_rows + [0] * pad, dtype=torch.int64),
            slot_mapping=torch.tensor(slots + [-1] * pad, dtype=torch.int64),
            block_table=torch.from_numpy(table),
            max_query_len=max([*lens, 0]),
            max_seq_len=max([*(length for _, length in self.rows), 0]),
        )

    def _drop(self, table, cache, row):
        """Free the blocks that lie wholly before the window of the row's first query."""
        if self.drop_before is None:
            return
        count, length = self.rows[row]
        oldest = max(0, length - count - self.drop_before + 1)
        for column in range(oldest // self.geometry.block_size):
            cache[table[row, column]] = torch.nan
            table[row, column] = 0

    def packed(self, parts):
        """Step's tensors of all rows in order, padding tokens as NaN."""
        steps = [
            part[len(part) - count :] for part, (count, _) in zip(parts, self.rows, strict=True)
        ]
        shape = (self.padding, *parts[0].shape[1:])
        return torch.cat([*steps, torch.full(shape, torch.nan, dtype=parts[0].dtype)])

    def run(self, backend, layer, lse=None):
        plan = backend.plan(self.batch)
        backend.write(self.packed(self.keys), self.packed(self.values), self.cache, plan)
        out = backend.run(self.packed(self.queries), self.cache, plan, layer, lse)
        assert out.dtype == DTYPES[self.geometry.dtype]
        assert out.shape == (self.batch.num_tokens, self.geometry.heads, self.geometry.v_dim)
        return out[: sum(self.batch.query_lens)]

    def truth(self, layer):
        """(output [T, heads, v_dim], lse [T, heads]) in float64."""
        g = self.geometry
        sinks = None if layer.sinks is None else layer.sinks.double().numpy()
        outs, sums = [], []
        for row, (count, length) in enumerate(self.rows):
            q, k, v = (x[row].double().numpy() for x in (self.queries, self.keys, self.values))
            out, lse = np.zeros((count, g.heads, g.v_dim)), np.zeros((count, g.heads))
            for token in range(count):
                position = length - count + token
                first = 0 if layer.window is None else max(0, position - layer.window + 1)
                seen = slice(first, position + 1)
                for head in range(g.heads):
                    kv = head // (g.heads // g.kv_heads)
                    s = k[seen, kv] @ q[token, head] * layer.scale
                    if layer.softcap is not None:
                        s = layer.softcap * np.tanh(s / layer.softcap)
                    if layer.alibi_slopes is not None:
                        slope = float(layer.alibi_slopes[head])
                        s = s + slope * (np.arange(first, position + 1) - position)
                    extra = np.exp(sinks[head]) if sinks is not None else 0.0
                    total = np.exp(s).sum() + extra
                    out[token, head] = np.exp(s) @ v[seen, kv] / total
                    lse[token, head] = np.log(total)
            outs.append(out)
            sums.append(lse)
        return np.concatenate(outs), np.concatenate(sums)


def build(backend, geometry):
    """A backend for the geometry; planning and running need no open device."""
    return backend(geometry.spec, KVLayout(), SimpleNamespace())
