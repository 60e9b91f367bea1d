"""Attention over a paged cache in Pallas: pieces of queries, blocks found through a table."""

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from cardan.platforms.tpu.pallas.tiles import LANES, largest_divisor, round_up, tile_rows

# Scores that do not count. Finite: a row that sees nothing yet has a maximum all the same.
_HIDDEN = -0.7 * float(jnp.finfo(jnp.float32).max)
# Rows of a chunk: products want as many as there are lanes, copies want to be long.
_LEAST_ROWS = LANES
_MOST_ROWS = 512
# Key heads of a grid step, each of which is its own stretch of code.
_MOST_HEADS = 8
# Bytes of vector memory, of which the smallest TPUs give a kernel 16 MiB: one of the two chunks;
# the scores of a chunk and one head; queries, results and sums of a grid step.
_CHUNK_BYTES = 1 << 20
_SCORE_BYTES = 1 << 19
_STATE_BYTES = 4 << 20


def paged_attention(  # noqa: PLR0913  (options, by keyword only)
    queries: Array,
    cache: Array,
    tables: Array,
    pieces: Array,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    interpret: Any = False,
) -> Array:
    """Causal attention of pieces of sequences over their keys and values in the cache.

    ``queries`` ``[pieces, queries, heads, head_dim]`` float32 or bfloat16; ``cache``
    ``[blocks, 2, kv_heads, block_size / n, n * head_dim]``, keys then values, n tokens to a row as
    in ``cache_shape``; ``tables`` ``[rows, width]`` int32, the blocks of each row's sequence;
    ``pieces`` ``[pieces, 3]`` int32: row, position of the first query, number of queries. A query
    sees the keys of its sequence up to its own position, which are in the cache already; with
    ``window``, the last so many of these. ``softcap`` c makes a score s into ``c * tanh(s / c)``.
    Heads are dense groups: query head h reads key head ``h // (heads // kv_heads)``. Returns like
    ``queries``; what is no query yields finite numbers.

    Products are of the queries' dtype, summed in float32. Only blocks with keys that a query of the
    piece sees are read, each once for all queries of the piece; places of these that none sees may
    hold anything. Tables and pieces lie in scalar memory, which has room for 256,000 numbers. Rows
    of a block are a multiple of 8 on a TPU. ``interpret`` is Pallas's: True or its parameters run
    the kernel without a TPU.

    Online softmax after Milakov and Gimelshein, https://arxiv.org/abs/1805.02867; chunks of blocks
    that are copied while the last one is computed are those of jax's own paged attention.
    """
    num_pieces, num_queries, _, head_dim = queries.shape
    form = _Form.of(queries, cache, tables.shape[1], _Scores(scale, window, softcap))
    num_rows, padding = num_queries * form.group, form.rows - num_queries * form.group
    grouped = queries.reshape(num_pieces, num_queries, -1, form.group, head_dim)
    grouped = grouped.swapaxes(1, 2).reshape(num_pieces, -1, num_rows, head_dim)
    grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, padding), (0, 0)))
    out_shape = jax.ShapeDtypeStruct(grouped.shape, queries.dtype)
    grouped = _for_each_place(grouped, form.places)
    out = pl.pallas_call(
        functools.partial(_kernel, form),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(num_pieces * form.parts,),
            in_specs=[form.of_step(grouped), pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=form.of_step(out_shape),
            scratch_shapes=form.scratch(cache),
        ),
        out_shape=out_shape,
        # A step begins the copies of the next one, so steps run in order.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="paged_attention",
    )(tables.reshape(-1), pieces.reshape(-1), grouped, cache)
    out = out[:, :, :num_rows].reshape(num_pieces, -1, num_queries, form.group, head_dim)
    return out.swapaxes(1, 2).reshape(queries.shape)


def _for_each_place(grouped: Array, places: int) -> Array:
    """Queries [.., rows, head_dim] -> [.., places * rows, places * head_dim].

    The rows of place n meet only what lies at place n of the cache's rows, for they are zeros
    elsewhere. They are queries of their own, whose results are put together in the end.
    """
    head_dim = grouped.shape[-1]
    wide = []
    for place in range(places):
        around = (place * head_dim, (places - 1 - place) * head_dim)
        wide.append(jnp.pad(grouped, ((0, 0), (0, 0), (0, 0), around)))
    return jnp.concatenate(wide, axis=2)


@dataclass(frozen=True, slots=True)
class _Scores:
    """How products of queries and keys become scores."""

    scale: float
    window: int | None
    softcap: float | None


@dataclass(frozen=True, slots=True)
class _Form:
    """Sizes of a call. A grid step is one part of one piece: ``heads`` key heads and their queries.

    ``rows`` of queries of a key head, ``group`` to a token, are there for each of the ``places`` of
    a row of the cache. A chunk is ``pages`` blocks of ``block_rows`` rows.
    """

    scores: _Scores
    heads: int
    parts: int
    group: int
    rows: int
    places: int
    pages: int
    block_rows: int
    width: int

    @classmethod
    def of(cls, queries: Array, cache: Array, width: int, scores: _Scores) -> "_Form":
        _, num_queries, num_heads, head_dim = queries.shape
        _, _, kv_heads, block_rows, row_size = cache.shape
        group, places = num_heads // kv_heads, row_size // head_dim
        rows = round_up(num_queries * group, tile_rows(queries))
        lanes = round_up(row_size, LANES)
        # Queries and results twice, for the next step's are on their way; sums; two columns.
        row_bytes = lanes * (4 * queries.dtype.itemsize + 4) + 2 * LANES * 4
        most_heads = min(_MOST_HEADS, _STATE_BYTES // (places * rows * row_bytes))
        heads = largest_divisor(kv_heads, most_heads)
        chunk_row_bytes = 2 * heads * lanes * cache.dtype.itemsize
        chunk_rows = min(
            _CHUNK_BYTES // chunk_row_bytes,
            _SCORE_BYTES // (places * rows * 4),
            width * block_rows,
        )
        chunk_rows = min(round_up(chunk_rows, _LEAST_ROWS), _MOST_ROWS)
        pages = math.ceil(chunk_rows / block_rows)
        return cls(scores, heads, kv_heads // heads, group, rows, places, pages, block_rows, width)

    @property
    def block_size(self) -> int:
        return self.block_rows * self.places

    @property
    def chunk_rows(self) -> int:
        return self.pages * self.block_rows

    def of_step(self, array: Any) -> pl.BlockSpec:
        """What a grid step has of queries or results [pieces, key heads, rows, size]."""
        return pl.BlockSpec(
            (1, self.heads, *array.shape[2:]),
            lambda step, *_: (lax.div(step, self.parts), lax.rem(step, self.parts), 0, 0),
        )

    def scratch(self, cache: Array) -> list[Any]:
        rows, row_size = self.places * self.rows, cache.shape[-1]
        column = pltpu.VMEM((self.heads, rows, 1), jnp.float32)
        return [
            pltpu.VMEM((2, self.pages, 2, self.heads, self.block_rows, row_size), cache.dtype),
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.SMEM((1,), jnp.int32),
            column,
            column,
            pltpu.VMEM((self.heads, rows, row_size), jnp.float32),
        ]


class _Refs(NamedTuple):
    """What a grid step reads and writes; what comes after ``out`` outlives the step.

    Chunks of a piece go to the two halves of ``chunks`` in turn; ``half`` is where the first chunk
    of this step goes. Whose copies are on their way, ``copies`` counts.
    """

    tables: Any
    pieces: Any
    queries: Any
    cache: Any
    out: Any
    chunks: Any
    copies: Any
    half: Any
    maxima: Any
    sums: Any
    totals: Any


class _Span(NamedTuple):
    """What a piece sees: positions of its first query, of its first key and behind its last one;
    blocks of its table, from one to behind the last one."""

    row: Any
    position: Any
    first_key: Any
    end: Any
    first_page: Any
    end_page: Any

    def num_chunks(self, form: _Form) -> Any:
        """One at least: that of a piece without queries copies nothing."""
        return jnp.maximum(lax.div(self.end_page - self.first_page + form.pages - 1, form.pages), 1)


def _span(refs: _Refs, form: _Form, step: Any) -> _Span:
    piece = 3 * lax.div(step, form.parts)
    row, position, count = (refs.pieces[piece + place] for place in range(3))
    end = jnp.where(count > 0, position + count, 0)
    first_key = 0
    if form.scores.window is not None:
        first_key = jnp.maximum(position + 1 - form.scores.window, 0)
    first_page = jnp.minimum(lax.div(first_key, form.block_size), end)
    end_page = lax.div(end + form.block_size - 1, form.block_size)
    return _Span(row, position, first_key, end, first_page, end_page)


def _copies(refs: _Refs, form: _Form, step: Any, chunk: Any, half: Any, begin: bool) -> None:
    """Begins the copies of a chunk, or waits for them."""
    span = _span(refs, form, step)
    heads = pl.ds(lax.rem(step, form.parts) * form.heads, form.heads)
    first = span.first_page + chunk * form.pages

    def copy(page: Any, _: Any) -> None:
        block = refs.tables[span.row * form.width + first + page]
        source, target = refs.cache.at[block, :, heads], refs.chunks.at[half, page]
        copies = pltpu.make_async_copy(source, target, refs.copies.at[half])
        copies.start() if begin else copies.wait()

    lax.fori_loop(0, jnp.clip(span.end_page - first, 0, form.pages), copy, None)


def _kernel(form: _Form, *all_refs: Any) -> None:
    refs = _Refs(*all_refs)
    step, num_steps = pl.program_id(0), pl.num_programs(0)
    span = _span(refs, form, step)
    num_chunks = span.num_chunks(form)

    def begin_first() -> None:
        refs.half[0] = 0
        _copies(refs, form, 0, 0, 0, begin=True)

    def attend(chunk: Any, half: Any) -> Any:
        is_last = chunk + 1 == num_chunks
        next_step, next_chunk = jnp.where(is_last, step + 1, step), jnp.where(is_last, 0, chunk + 1)
        pl.when(next_step < num_steps)(
            lambda: _copies(refs, form, next_step, next_chunk, 1 - half, begin=True)
        )
        _copies(refs, form, step, chunk, half, begin=False)
        _attend(refs, form, span, chunk, half)
        return 1 - half

    pl.when(step == 0)(begin_first)
    refs.maxima[...] = jnp.full_like(refs.maxima, _HIDDEN)
    refs.sums[...] = jnp.zeros_like(refs.sums)
    refs.totals[...] = jnp.zeros_like(refs.totals)
    refs.half[0] = lax.fori_loop(0, num_chunks, attend, refs.half[0])
    _put_together(refs, form)


def _attend(refs: _Refs, form: _Form, span: _Span, chunk: Any, half: Any) -> None:
    """Takes a chunk into the sums of all heads of the step."""
    row_size = refs.cache.shape[-1]
    head_dim = row_size // form.places
    first = (span.first_page + chunk * form.pages) * form.block_size
    # Of each row of queries: its place, and the last key that it sees, as if that were at place 0.
    row = lax.broadcasted_iota(jnp.int32, (form.places * form.rows, 1), 0)
    place = lax.div(row, form.rows)
    query = span.position + lax.div(row - place * form.rows, form.group)
    last = jnp.minimum(query, span.end - 1) - place
    key = first + form.places * lax.broadcasted_iota(jnp.int32, (1, form.chunk_rows), 1)
    is_seen = key <= last
    if form.scores.window is not None:
        is_seen &= key > query - place - form.scores.window
    size = (form.chunk_rows, row_size)
    held = first + form.places * lax.broadcasted_iota(jnp.int32, size, 0)
    held += lax.div(lax.broadcasted_iota(jnp.int32, size, 1), head_dim)
    is_held = (held >= span.first_key) & (held < span.end)
    for head in range(form.heads):
        keys, values = (_numbers(refs.chunks[half, :, kind, head], is_held) for kind in range(2))
        scores = jnp.where(is_seen, _scores(form.scores, refs.queries[0, head], keys), _HIDDEN)
        _sum_up(refs, head, scores, values)


def _numbers(blocks: Array, is_held: Array) -> Array:
    """Rows of a chunk, with zeros for what no query sees.

    That may be no number, which neither a weight of 0 would hide nor the zeros of a query that
    meet what shares a row with a key that it sees.
    """
    return jnp.where(is_held, blocks.reshape(is_held.shape), jnp.zeros((), blocks.dtype))


def _scores(scores: _Scores, queries: Array, keys: Array) -> Array:
    products = _product(queries, keys.astype(queries.dtype), contracted=1) * scores.scale
    if scores.softcap is None:
        return products
    return scores.softcap * jnp.tanh(products / scores.softcap)


def _sum_up(refs: _Refs, head: int, scores: Array, values: Array) -> None:
    """One step of the online softmax of a head."""
    before = refs.maxima[head]
    maxima = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
    weights, kept = jnp.exp(scores - maxima), jnp.exp(before - maxima)
    dtype = refs.queries.dtype
    products = _product(weights.astype(dtype), values.astype(dtype), contracted=0)
    refs.maxima[head] = maxima
    refs.sums[head] = refs.sums[head] * kept + jnp.sum(weights, axis=1, keepdims=True)
    refs.totals[head] = refs.totals[head] * kept + products


def _put_together(refs: _Refs, form: _Form) -> None:
    """The result: the places' mean values, weighted with what their sums are of the whole."""
    head_dim = refs.out.shape[-1]
    ranges = [slice(place * form.rows, (place + 1) * form.rows) for place in range(form.places)]
    maxima = functools.reduce(jnp.maximum, [refs.maxima[:, rows] for rows in ranges])
    sums, totals = jnp.zeros_like(maxima), jnp.zeros(refs.out.shape[1:], jnp.float32)
    for place, rows in enumerate(ranges):
        kept = jnp.exp(refs.maxima[:, rows] - maxima)
        sums += kept * refs.sums[:, rows]
        totals += kept * refs.totals[:, rows, place * head_dim : (place + 1) * head_dim]
    refs.out[0] = (totals / sums).astype(refs.out.dtype)


def _product(left: Array, right: Array, contracted: int) -> Array:
    """Rows of ``left`` with ``right``, of which one axis is summed over; float32."""
    is_exact = left.dtype == jnp.float32
    return lax.dot_general(
        left,
        right,
        (((1,), (contracted,)), ((), ())),
        # TPUs round float32 to bfloat16 unless told not to.
        precision=lax.Precision.HIGHEST if is_exact else lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )
