"""Gathers one step's tensors where the device's memory is the host's own."""

import numpy as np
import torch

from cardan.core.interfaces.device import Event
from cardan.core.runner.block_tables import BlockTables
from cardan.core.runner.request_states import RequestStates
from cardan.core.runner.step_buffers import HostLengths, StepBuffers, StepInputs
from cardan.core.runner.step_shapes import StepShape
from cardan.core.types.step import Int32, SchedulerOutput


class HostInputBatch(StepBuffers):
    """Fills the buffers through NumPy, without packing anything.

    For devices that compute at once in host memory: nothing is queued that has yet to write what
    is read here. A decode step costs the same number of calls for any number of rows.
    """

    def __init__(
        self, max_num_tokens: int, max_num_rows: int, tables: BlockTables, block_size: int
    ) -> None:
        super().__init__(max_num_tokens, max_num_rows, tables, block_size, torch.device("cpu"))
        self._counting = np.arange(max(max_num_tokens, max_num_rows) + 1, dtype=np.int64)
        fields = self._token_fields.numpy()
        self._host_token_ids, self._host_positions, self._host_token_rows = fields[:3]
        self._host_slots = fields[3:]
        fields = self._row_fields.numpy()
        self._host_starts, self._host_seq_lens, self._host_places, self._host_targets = fields
        self._host_tables = self._step_tables.numpy()

    def gather(
        self, plan: SchedulerOutput, states: RequestStates, shape: StepShape, num_logit_rows: int
    ) -> StepInputs:
        num_rows, num_tokens = len(plan.rows), plan.num_tokens
        counts, computed = plan.num_scheduled_tokens, plan.num_computed_tokens
        starts, lens = self._host_starts, self._host_seq_lens
        positions, token_rows = self._host_positions, self._host_token_rows
        np.add(computed, counts, out=lens[:num_rows], casting="unsafe")
        if num_tokens == num_rows:
            starts[: num_rows + 1] = self._counting[: num_rows + 1]
            token_rows[:num_rows] = self._counting[:num_rows]
            positions[:num_rows] = computed
        else:
            starts[0] = 0
            np.cumsum(counts, out=starts[1 : num_rows + 1])
            token_rows[:num_tokens] = np.repeat(self._counting[:num_rows], counts)
            first = computed - starts[:num_rows]
            np.add(
                self._counting[:num_tokens], np.repeat(first, counts), out=positions[:num_tokens]
            )
        lengths = HostLengths(
            query_lens=counts.tolist() + [0] * (shape.num_rows - num_rows),
            seq_lens=lens[:num_rows].tolist() + [0] * (shape.num_rows - num_rows),
            max_query_len=1 if num_tokens == num_rows else int(counts.max()),
            max_seq_len=int(lens[:num_rows].max()),
        )
        self._pad(num_rows, num_tokens, shape)
        rows_of_tokens = plan.rows[token_rows[:num_tokens]]
        self._host_token_ids[:num_tokens] = states.host_token_ids[
            rows_of_tokens, positions[:num_tokens]
        ]
        for group in range(self.tables.num_groups):
            self._fill_slots(group, plan.rows, num_tokens, shape)
        num_samples = self._fill_samples(plan, states, num_logit_rows)
        return self._inputs(shape, lengths, (num_samples, num_logit_rows))

    def hold_until(self, event: Event | None) -> None:
        """Nothing outlasts ``gather``."""

    def close(self) -> None:
        """There is nothing to give back."""

    def _pad(self, num_rows: int, num_tokens: int, shape: StepShape) -> None:
        """What padding tokens and rows hold: tokens of row 0 at position 0; rows without any."""
        self._host_starts[num_rows + 1 : shape.num_rows + 1] = num_tokens
        self._host_seq_lens[num_rows : shape.num_rows] = 0
        self._host_positions[num_tokens : shape.num_tokens] = 0
        self._host_token_rows[num_tokens : shape.num_tokens] = 0
        self._host_token_ids[num_tokens : shape.num_tokens] = 0

    def _fill_samples(
        self, plan: SchedulerOutput, states: RequestStates, num_logit_rows: int
    ) -> int:
        """Fill the places of logits and of sampled tokens; the number of samples."""
        rows, ends = plan.rows, self._host_starts[1 : len(plan.rows) + 1]
        lengths = self._host_seq_lens[: len(rows)]
        if not plan.samples.all():
            rows, ends, lengths = rows[plan.samples], ends[plan.samples], lengths[plan.samples]
        places, targets = self._host_places, self._host_targets[: len(rows)]
        np.subtract(ends, 1, out=places[: len(rows)])
        places[len(rows) : num_logit_rows] = 0
        np.multiply(rows, np.int64(states.token_ids.shape[1]), out=targets)
        targets += lengths
        return len(rows)

    def _fill_slots(self, group: int, rows: Int32, num_tokens: int, shape: StepShape) -> None:
        """Fill the group's block table and slots."""
        width, size = shape.num_blocks, self._block_size
        table = self._host_tables[group, : shape.num_rows * width].reshape(shape.num_rows, width)
        table[: len(rows)] = self.tables.tables[group, rows, :width]
        table[len(rows) :] = 0
        positions, slots = self._host_positions[:num_tokens], self._host_slots[group]
        blocks = table[self._host_token_rows[:num_tokens], positions // size]
        np.add(blocks * np.int64(size), positions % size, out=slots[:num_tokens])
        slots[num_tokens : shape.num_tokens] = -1
