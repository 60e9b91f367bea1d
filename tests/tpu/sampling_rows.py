"""Rows that are sampled twice, by the core's sampler and by the functions of programs."""

import jax
import jax.numpy as jnp
import numpy as np
import torch

from cardan.core.ops.catalogue import CATALOGUE
from cardan.core.ops.registry import KernelRegistry
from cardan.core.sampling.sampler import Sampler
from cardan.core.sampling.sampling_states import SamplingStates
from cardan.core.types.step import BlockCopies, BlockEdits, NewRow, SchedulerOutput
from cardan.platforms.tpu.logits_edits import edited_logits
from cardan.platforms.tpu.rows import Rows
from cardan.platforms.tpu.sampling import Settings, choose_tokens
from cardan.platforms.tpu.step_fields import StepFields
from cardan.platforms.tpu.step_layout import StepLayout, StepShape

EMPTY = np.zeros(0, np.int32)
MAX_LEN = 64


class SampledRows:
    """Both samplers, each with the tokens that it chose before; prompts have two to five tokens.

    ``numbers`` are the permanent rows of the batch.
    """

    def __init__(self, params, vocab_size, seed, stop_token_ids=(), words=()):
        rng = np.random.default_rng(seed)
        size = len(params)
        self.size, self.vocab_size = size, vocab_size
        self.numbers = rng.permutation(size).astype(np.int32)
        ops = KernelRegistry(CATALOGUE, (), device=torch.device("cpu"), features=())
        states = SamplingStates(size, vocab_size, "cpu", ops)
        self.sampler = Sampler(states, ops)
        self.rows = Rows(size, MAX_LEN, vocab_size)
        self._programs = {}
        self.prompts = rng.integers(2, 6, size)
        self.history = np.zeros((size + 1, MAX_LEN), np.int32)
        self.lengths = self.prompts.copy()
        self.new_rows = []
        for index, item in enumerate(params):
            row = int(self.numbers[index])
            tokens = rng.integers(0, vocab_size, self.prompts[index]).astype(np.int32)
            self.history[row, : len(tokens)] = tokens
            new = NewRow(
                row=row,
                key=index,
                token_ids=tokens,
                num_prompt_tokens=len(tokens),
                num_computed_tokens=0,
                params=item,
                seed=100 * seed + index,
                stop_token_ids=stop_token_ids,
                bad_words_token_ids=words if item.bad_words else (),
                block_ids=(np.arange(MAX_LEN, dtype=np.int32),),
            )
            self.new_rows.append(new)
            states.add(new)

    def both(self, logits, mask=None):
        """The tokens [R] that programs choose, and those of the core; the latter go on."""
        found = self._of_programs(logits, mask)
        outputs = (self.lengths - self.prompts).astype(np.int64)
        result = self.sampler.sample(torch.from_numpy(logits.copy()), self.numbers, outputs, mask)
        truth = result.token_ids.numpy()
        self.history[self.numbers, self.lengths] = truth
        self.lengths += 1
        return found, truth

    def _of_programs(self, logits, mask):
        step = SchedulerOutput(
            step_id=0,
            new_rows=self.new_rows,
            freed_rows=[],
            block_edits=(BlockEdits(EMPTY, EMPTY, EMPTY),),
            block_copies=(BlockCopies(EMPTY, EMPTY),),
            rows=self.numbers,
            keys=self.numbers.astype(np.int64),
            num_scheduled_tokens=np.ones(self.size, np.int32),
            num_computed_tokens=(self.lengths - 1).astype(np.int32),
            samples=np.ones(self.size, np.bool_),
        )
        self.rows.apply(step)
        self.new_rows = []
        batch = StepFields(step, self.rows, mask)
        padded = self.size + 3
        shape = batch.flavoured(StepShape(padded, padded, MAX_LEN, False))
        layout = StepLayout(shape, 1)
        words = layout.packed(batch.fields(layout))
        padding = np.zeros((padded - self.size, self.vocab_size), np.float32)
        given = np.concatenate([logits, padding])
        chosen = self._programs.setdefault(shape, _chosen(layout))
        tokens = chosen(given, batch.bias(shape), self.history, words)
        return np.asarray(tokens)[: self.size]


def _chosen(layout):
    @jax.jit
    def chosen(logits, bias, history, words):
        fields = layout.unpacked(words)
        if layout.shape.edited:
            logits = edited_logits(logits, bias, history, fields)
        return choose_tokens(jnp.asarray(logits), Settings(*(fields[n] for n in Settings._fields)))

    return chosen
