"""Compiled programs: one for each shape of a step, made once."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cardan.core.types.step import Int32
from cardan.platforms.tpu.attention import CachedAttention, PagedKernels
from cardan.platforms.tpu.buckets import rounded_up
from cardan.platforms.tpu.logits_edits import edited_logits
from cardan.platforms.tpu.placement import Placement
from cardan.platforms.tpu.sampling import LogprobsTable, Settings, choose_tokens, logprobs_table
from cardan.platforms.tpu.step_layout import StepLayout, StepShape
from cardan.platforms.tpu.step_state import ProgramSizes, StepState
from cardan.platforms.tpu.traced_model import TracedModel

logger = logging.getLogger("cardan.engine")

# Compilations that take longer are told.
_TOLD_SECONDS = 1.0
# Rows whose tokens go to the device together, and how many of each row's.
ENTERING_ROWS = 8
_ENTERING_TOKENS = (256, 2048, 16384)
# Rows of logits made at once for log-probabilities of prompts.
_PROMPT_LOGITS_ROWS = 256


class StepResult(NamedTuple):
    """``rows`` [4, R] int32: token, whether the model's logits were sound, whether those that were
    sampled from were, whether the hidden states were finite. ``prompt_table``: of each token [T] of
    the step, of what follows it."""

    rows: jax.Array
    table: LogprobsTable | None
    prompt_table: LogprobsTable | None


class Programs:
    """Owner of the compiled programs of one model."""

    def __init__(
        self,
        model: TracedModel,
        kernels: PagedKernels,
        placement: Placement,
        sizes: ProgramSizes,
        precise: bool,
    ) -> None:
        """``precise``: products of float32 are not rounded to bfloat16, as TPUs else do."""
        self._model = model
        self._kernels = kernels
        self._placement = placement
        self._sizes = sizes
        self._precision = "highest" if precise else "default"
        self._steps: dict[StepShape, Any] = {}
        self._others: dict[tuple[str, int, int], Any] = {}

    @property
    def num_steps(self) -> int:
        """Programs of steps that were compiled."""
        return len(self._steps)

    def layout(self, shape: StepShape) -> StepLayout:
        return StepLayout(shape, self._sizes.block_size)

    def run(
        self, shape: StepShape, state: StepState, words: Any, bias: Any | None
    ) -> tuple[StepState, StepResult]:
        """Launch a step; ``state`` is used up. ``words`` as packed by the shape's layout, ``bias``
        [E, V] float32 where rows are biased. Does not wait."""
        inputs = (self._model.weights, state, words)
        step = self.step(shape, state)
        found: tuple[StepState, StepResult] = step(*inputs) if bias is None else step(*inputs, bias)
        return found

    def step(self, shape: StepShape, state: Any) -> Any:
        """The compiled program of a shape; of ``state`` only shapes and places matter."""
        if shape not in self._steps:
            began = time.monotonic()
            self._steps[shape] = self.lowered(shape, state).compile()
            seconds = time.monotonic() - began
            if seconds > _TOLD_SECONDS:
                logger.info("compiled the step of %s in %.1f s", shape, seconds)
        return self._steps[shape]

    def lowered(self, shape: StepShape, state: Any) -> Any:
        """The traced program of a shape, ready to be compiled for the devices it is placed on."""
        layout = self.layout(shape)
        whole = self._placement.whole
        weights = self._model.weights or self._model.abstract_weights(self._placement)
        inputs = [
            _like(weights),
            _like(state),
            self._numbers(layout.size),
        ]
        if shape.num_biased:
            bias = (shape.num_biased, self._sizes.vocab_size)
            inputs.append(jax.ShapeDtypeStruct(bias, jnp.float32, sharding=whole))
        places = StepState(*jax.tree.map(lambda array: array.sharding, tuple(_like(state))))
        jitted = jax.jit(
            partial(self._traced, layout), donate_argnums=1, out_shardings=(places, whole)
        )
        with jax.default_matmul_precision(self._precision):
            return jitted.lower(*inputs)

    def enter(self, state: StepState, rows: Sequence[int], tokens: Sequence[Int32]) -> StepState:
        """Make ``tokens[i]`` those of ``rows[i]`` from position 0 on; at most ``ENTERING_ROWS``."""
        count = 1 if len(rows) == 1 else ENTERING_ROWS
        width = self._width(max(map(len, tokens)))
        new = np.zeros((count, width), np.int32)
        # Padding goes behind the last row, and is dropped.
        places = np.full(count, len(state.history), np.int32)
        places[: len(rows)] = rows
        for line, ids in zip(new, tokens, strict=False):
            line[: len(ids)] = ids
        run = self._enter_program(state, count, width)
        return state._replace(history=run(state.history, places, new))

    def copy_blocks(self, state: StepState, sources: Int32, targets: Int32) -> StepState:
        """Copy whole blocks of every layer; no block is a source and a target."""
        size = rounded_up(len(sources))
        # Padding copies the block of nobody to itself.
        pairs = np.zeros((2, size), np.int32)
        pairs[:, : len(sources)] = sources, targets
        run = self._copy_program(state, size)
        return state._replace(caches=run(state.caches, pairs))

    def prepare_changes(self, state: StepState) -> None:
        """Compile what changes the state between steps: rows that enter, few copies."""
        widths = {self._width(length) for length in (1, *_ENTERING_TOKENS, self._sizes.max_len)}
        for width in widths:
            for count in (1, ENTERING_ROWS):
                self._enter_program(state, count, width)
        self._copy_program(state, rounded_up(1))

    def _width(self, length: int) -> int:
        """Tokens of a row that are written at once where there are ``length``."""
        wider = (width for width in _ENTERING_TOKENS if width >= length)
        return min(next(wider, self._sizes.max_len), self._sizes.max_len)

    def _enter_program(self, state: StepState, count: int, width: int) -> Any:
        def entered(history: jax.Array, rows: jax.Array, new: jax.Array) -> jax.Array:
            return history.at[rows, :width].set(new, mode="drop")

        inputs = self._numbers(count), self._numbers(count, width)
        return self._other(("enter", count, width), entered, state.history, inputs)

    def _copy_program(self, state: StepState, size: int) -> Any:
        def copied(caches: list[jax.Array], pairs: jax.Array) -> list[jax.Array]:
            return [cache.at[pairs[1]].set(cache[pairs[0]]) for cache in caches]

        return self._other(("copy", size, 0), copied, state.caches, (self._numbers(2, size),))

    def _numbers(self, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self._placement.whole)

    def _other(
        self, key: tuple[str, int, int], change: Callable[..., Any], part: Any, inputs: Any
    ) -> Any:
        """The compiled program of a change of ``part`` of the state, which it uses up."""
        if key not in self._others:
            like = _like(part)
            places = jax.tree.map(lambda array: array.sharding, like)
            jitted = jax.jit(change, donate_argnums=0, out_shardings=places)
            self._others[key] = jitted.lower(like, *inputs).compile()
        return self._others[key]

    def _traced(
        self,
        layout: StepLayout,
        weights: Sequence[jax.Array],
        state: StepState,
        words: jax.Array,
        bias: jax.Array | None = None,
    ) -> tuple[StepState, StepResult]:
        fields, shape = layout.unpacked(words), layout.shape
        attention = CachedAttention(state.caches, fields, layout, self._kernels)
        positions = fields["positions"]
        token_ids = state.history[fields["token_rows"], positions]
        is_narrow = self._model.narrows and shape.num_prompt_logprobs is None
        ends = fields["ends"] if is_narrow else None
        hidden = self._model.hidden_states(weights, (token_ids, positions), attention, ends)
        is_finite = jnp.all(jnp.isfinite(hidden), axis=-1)
        if not is_narrow:
            is_finite = _of_rows(is_finite, fields, len(state.history))
        last = hidden if is_narrow else hidden[fields["ends"]]
        logits = given = self._model.logits(weights, last)
        if shape.edited:
            logits = edited_logits(logits, bias, state.history, fields)
        settings = Settings(*(fields[name] for name in Settings._fields))
        is_sound, is_left = _has_finite_top(given), _has_finite_top(logits)
        tokens = jnp.where(is_sound & is_left, choose_tokens(logits, settings), 0)
        place = jnp.where(fields["samples"] > 0, fields["lengths"], self._sizes.max_len)
        history = state.history.at[fields["rows"], place].set(tokens, mode="drop")
        flags = [flag.astype(jnp.int32) for flag in (is_sound, is_left, is_finite)]
        table = prompt_table = None
        if shape.num_logprobs is not None:
            table = logprobs_table(given, tokens, shape.num_logprobs)
        if shape.num_prompt_logprobs is not None:
            following = jnp.minimum(positions + 1, self._sizes.max_len - 1)
            followers = state.history[fields["token_rows"], following]
            wanted = shape.num_prompt_logprobs
            prompt_table = self._prompt_table(weights, hidden, followers, wanted)
        result = StepResult(jnp.stack([tokens, *flags]), table, prompt_table)
        return StepState(attention.caches, history), result

    def _prompt_table(
        self, weights: Sequence[jax.Array], hidden: jax.Array, followers: jax.Array, k: int
    ) -> LogprobsTable:
        """Of ``followers`` [T], which come after the tokens with hidden states [T, hidden_size]; in
        parts, so that the logits of few are there at once."""
        num_tokens = len(hidden)
        size = min(num_tokens, _PROMPT_LOGITS_ROWS)
        missing = -num_tokens % size
        hidden = jnp.pad(hidden, ((0, missing), (0, 0))).reshape(-1, size, hidden.shape[1])
        followers = jnp.pad(followers, (0, missing)).reshape(-1, size)

        def table(part: tuple[jax.Array, jax.Array]) -> LogprobsTable:
            return logprobs_table(self._model.logits(weights, part[0]), part[1], k)

        parts = jax.lax.map(table, (hidden, followers))
        return LogprobsTable(*(array.reshape(-1, *array.shape[2:])[:num_tokens] for array in parts))


def _of_rows(is_finite: jax.Array, fields: Mapping[str, jax.Array], num_rows: int) -> jax.Array:
    """Whether all tokens of each row of the step are; ``is_finite`` [T], of ``num_rows`` permanent
    rows."""
    num_bad = jnp.zeros(num_rows, jnp.int32).at[fields["token_rows"]].add(~is_finite)
    found: jax.Array = num_bad[fields["rows"]] == 0
    return found


def _has_finite_top(logits: jax.Array) -> jax.Array:
    return jnp.isfinite(jnp.max(logits, axis=-1))


def _like(arrays: Any) -> Any:
    """Shapes, dtypes and places of arrays."""
    return jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding),
        arrays,
    )
