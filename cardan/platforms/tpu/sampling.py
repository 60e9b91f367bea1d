"""Sampling inside a program: the same choices as the core's sampler makes, in float32.

Truncation needs no sort: a cut is searched bit by bit in the ordered bits of the numbers, in 32
passes that count, or add up, what lies above a candidate.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

# Tokens a block of the vocabulary in sums.
_BLOCK = 256


class Settings(NamedTuple):
    """Of each row [R]: ``temperature`` (0: greedy), ``top_k`` (0: off), ``top_p`` (1: off),
    ``min_p`` (0: off), ``uniform`` in [0, 1)."""

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    uniform: jax.Array


class LogprobsTable(NamedTuple):
    """``token_ids``, ``logprobs`` [R, 1 + k]: the chosen token, then the likeliest ones; ``ranks``
    [R] of the chosen one, from 1 on."""

    token_ids: jax.Array
    logprobs: jax.Array
    ranks: jax.Array


def choose_tokens(logits: jax.Array, settings: Settings) -> jax.Array:
    """The likeliest token of greedy rows, else one drawn from what is left: [R] int32.

    ``logits`` [R, V] float32, -inf excludes a token. The definition is the operation
    ``choose_tokens``. The token of a row without a finite logit has no meaning.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    is_drawn = settings.temperature > 0

    def drawn(_: None) -> jax.Array:
        temperature = jnp.where(is_drawn, settings.temperature, 1.0)[:, None]
        shifted = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature
        is_cut = (settings.top_k > 0) | (settings.top_p < 1) | (settings.min_p > 0)
        kept = jax.lax.cond(
            jnp.any(is_cut & is_drawn), lambda: _truncated(shifted, settings), lambda: shifted
        )
        return jnp.where(is_drawn, _drawn(kept, settings.uniform), greedy)

    return jax.lax.cond(jnp.any(is_drawn), drawn, lambda _: greedy, None)


def logprobs_table(logits: jax.Array, tokens: jax.Array, k: int) -> LogprobsTable:
    """Log-probabilities of ``tokens`` [R] and of the ``k`` likeliest ones. Of equal logits the
    lower id is first; equal ones count the same rank."""
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)
    values, ids = jax.lax.top_k(logits, k)
    return LogprobsTable(
        jnp.concatenate([tokens[:, None], ids.astype(jnp.int32)], axis=-1),
        jnp.concatenate([chosen, values], axis=-1) - total,
        jnp.sum(logits > chosen, axis=-1, dtype=jnp.int32) + 1,
    )


def _truncated(shifted: jax.Array, settings: Settings) -> jax.Array:
    """top-k, then top-p of what it leaves, then min-p; see ``apply_min_p_top_k_top_p``."""
    vocab_size = shifted.shape[-1]
    keys = _ordered(shifted)
    top_k = jnp.where(settings.top_k > 0, jnp.minimum(settings.top_k, vocab_size), vocab_size)
    kth = _largest_cut(keys, jnp.ones_like(shifted), top_k.astype(jnp.float32))
    weights = jnp.where(keys >= kth[:, None], jnp.exp(shifted), 0.0)
    mass = settings.top_p * _total(weights)
    cut = jnp.where(settings.top_p < 1, jnp.maximum(_largest_cut(keys, weights, mass), kth), kth)
    kept = keys >= cut[:, None]
    # Of tokens that tie for the last place of top-p the lowest ids stay, as many as are needed.
    tied = keys == cut[:, None]
    above = jnp.where(keys > cut[:, None], weights, 0.0)
    each = jnp.max(jnp.where(tied, weights, 0.0), axis=-1)
    missing = (mass - _total(above)) / jnp.where(each > 0, each, 1.0)
    needed = jnp.where(settings.top_p < 1, jnp.maximum(jnp.ceil(missing), 1), vocab_size)
    kept &= ~tied | (jnp.cumsum(tied, axis=-1) <= needed[:, None])
    kept &= shifted >= jnp.log(settings.min_p)[:, None]
    return jnp.where(kept, shifted, -jnp.inf)


def _ordered(x: jax.Array) -> jax.Array:
    """Unsigned integers in the order of float32 numbers."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    top = jnp.uint32(1 << 31)
    return jnp.where(bits >= top, ~bits, bits | top)


def _largest_cut(keys: jax.Array, weights: jax.Array, wanted: jax.Array) -> jax.Array:
    """The largest key [R] such that the weights of keys at or above it add up to ``wanted`` [R]."""

    def narrowed(bit: jax.Array, cut: jax.Array) -> jax.Array:
        candidate = cut | (jnp.uint32(1) << (31 - bit).astype(jnp.uint32))
        reached = _total(jnp.where(keys >= candidate[:, None], weights, 0.0)) >= wanted
        return jnp.where(reached, candidate, cut)

    return jax.lax.fori_loop(0, 32, narrowed, jnp.zeros(len(keys), jnp.uint32))


def _total(weights: jax.Array) -> jax.Array:
    """Sums [R] over the vocabulary, the same ones whatever is masked elsewhere."""
    return jnp.sum(_blocks(weights).sum(-1), axis=-1)


def _blocks(weights: jax.Array) -> jax.Array:
    """[R, V] as [R, V / block, block], padded with zeros."""
    padding = -weights.shape[-1] % _BLOCK
    return jnp.pad(weights, ((0, 0), (0, padding))).reshape(len(weights), -1, _BLOCK)


def _drawn(kept: jax.Array, uniform: jax.Array) -> jax.Array:
    """By inversion of the distribution, in order of ids; see the operation ``sample_tokens``."""
    weights = _blocks(jax.nn.softmax(kept, axis=-1))
    ends = jnp.cumsum(weights.sum(-1), axis=-1)
    mass = ends[:, -1:]
    # A product that rounds up to the whole mass would point behind the last token.
    target = jnp.minimum(uniform[:, None] * mass, mass * (1 - jnp.finfo(jnp.float32).eps))
    block = jnp.minimum(jnp.sum(ends <= target, axis=-1, keepdims=True), ends.shape[1] - 1)
    before = jnp.take_along_axis(ends, jnp.maximum(block - 1, 0), axis=-1)
    start = jnp.where(block > 0, before, 0.0)
    inside = jnp.take_along_axis(weights, block[:, :, None], axis=1)[:, 0]
    offset = jnp.sum(jnp.cumsum(inside, axis=-1) <= target - start, axis=-1)
    # The block's own sum may be rounded otherwise than its prefix sums: stay on a possible token.
    places = jnp.arange(_BLOCK)
    last = jnp.max(jnp.where(inside > 0, places, 0), axis=-1)
    token = block[:, 0] * _BLOCK + jnp.minimum(offset, last)
    return jnp.minimum(token, kept.shape[-1] - 1).astype(jnp.int32)
