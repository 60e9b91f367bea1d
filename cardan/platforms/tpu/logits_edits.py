"""Changes of logits before sampling, traced: bias, bad words, penalties."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from cardan.platforms.tpu.row_edits import ANY_TOKEN, NO_PENALTIES


def edited_logits(
    logits: jax.Array, bias: jax.Array | None, history: jax.Array, fields: Mapping[str, jax.Array]
) -> jax.Array:
    """The logits [R, V] that rows of an edited step sample from.

    ``bias`` [E, V] float32 is added, -inf forbids, to the rows ``bias_rows`` [E] (R: padding);
    ``history`` [rows, L] int32 are the tokens of the permanent rows, of which ``fields["lengths"]``
    are known. Fields as of ``StepLayout``: ``prompt_lengths`` [R], ``penalties`` [3, R]
    (repetition, presence, frequency), ``words`` [W, L] with what must precede and the forbidden
    token last (``ANY_TOKEN`` where nothing must), of the rows ``word_rows`` [W] (R: padding).
    """
    known = history[fields["rows"]]
    if bias is not None:
        logits = logits.at[fields["bias_rows"]].add(bias, mode="drop")
    logits = _without_bad_words(logits, known, fields)
    neutral = jnp.asarray(NO_PENALTIES, jnp.float32)[:, None]
    return jax.lax.cond(
        jnp.any(fields["penalties"] != neutral),
        lambda: _penalised(logits, known, fields),
        lambda: logits,
    )


def _without_bad_words(
    logits: jax.Array, known: jax.Array, fields: Mapping[str, jax.Array]
) -> jax.Array:
    words, rows = fields["words"], fields["word_rows"]
    if not words.size:
        return logits
    prefixes = words[:, :-1]
    within = jnp.minimum(rows, len(logits) - 1)
    back = jnp.arange(-prefixes.shape[1], 0, dtype=jnp.int32)
    positions = fields["lengths"][within][:, None] + back
    tails = known[within[:, None], jnp.maximum(positions, 0)]
    # What the prompt holds does not count.
    is_output = positions >= fields["prompt_lengths"][within][:, None]
    matches = jnp.all((prefixes == ANY_TOKEN) | ((tails == prefixes) & is_output), axis=-1)
    change = jnp.where(matches, -jnp.inf, 0.0)
    return logits.at[rows, words[:, -1]].add(change, mode="drop")


def _penalised(logits: jax.Array, known: jax.Array, fields: Mapping[str, jax.Array]) -> jax.Array:
    """As the operation ``apply_penalties`` has it, with counts made from the tokens."""
    num_rows = len(logits)
    repetition, presence, frequency = fields["penalties"][:, :, None]
    positions = jnp.arange(known.shape[1], dtype=jnp.int32)
    is_known = positions < fields["lengths"][:, None]
    is_output = is_known & (positions >= fields["prompt_lengths"][:, None])
    places = jnp.arange(num_rows, dtype=jnp.int32)[:, None]

    def counted(which: jax.Array) -> jax.Array:
        zeros = jnp.zeros(logits.shape, jnp.float32)
        return zeros.at[places, known].add(which.astype(jnp.float32), mode="drop")

    outputs = counted(is_output)
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    penalised = jnp.where(counted(is_known) > 0, repeated, logits)
    return penalised - outputs * frequency - (outputs > 0) * presence
