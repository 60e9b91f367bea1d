"""Brings a step to a device: packed on the host, one copy, one kernel."""

import numpy as np
import torch

from cardan.core.interfaces.device import Device, Event
from cardan.core.interfaces.kernels import Kernel
from cardan.core.ops.packed_step import PackedStep, StepSizes, first_staged_word
from cardan.core.runner.block_tables import BlockTables
from cardan.core.runner.host_results import HostResults
from cardan.core.runner.request_states import RequestStates
from cardan.core.runner.staging import StagingRing
from cardan.core.runner.step_buffers import HostLengths, StepBuffers, StepInputs
from cardan.core.runner.step_shapes import StepShape
from cardan.core.types.step import Int32, SchedulerOutput

# Staged words that are copied with every step; more of them cost a longer copy.
_FEW_WORDS = 1024


class InputBatch(StepBuffers):
    """Owner of the device's block tables and of the words that steps are packed in.

    The host writes what a step is and what it changes: words in the order of its rows, new rows'
    tokens and changed block ids. The device has the rest in its rows and derives the step's tensors
    itself, so the work of the host does not grow with tokens or contexts. No step waits for the
    device unless more are in flight than there are staging buffers.
    """

    def __init__(
        self,
        max_num_tokens: int,
        max_num_rows: int,
        tables: BlockTables,
        block_size: int,
        device: Device,
        step_inputs: Kernel,
    ) -> None:
        """``step_inputs``: the kernel of that operation on ``device``, which has a torch device."""
        target = device.torch_device or torch.device("cpu")
        super().__init__(max_num_tokens, max_num_rows, tables, block_size, target)
        self._kernel = step_inputs
        self.rooms = HostResults(device, max_num_rows)
        self._counting = np.arange(self._num_columns, dtype=np.int32)
        self._device_tables = torch.zeros(tables.tables.shape, dtype=torch.int32, device=target)
        fixed = first_staged_word(tables.num_groups, self._num_columns)
        # Prompts of two full steps, and two new blocks for each row.
        num_staged = 2 * max_num_tokens + 2 * tables.num_groups * max_num_rows
        num_staged = max(num_staged, _FEW_WORDS)
        self._ring = StagingRing(device, fixed + num_staged, fixed + _FEW_WORDS)
        self._packed = torch.zeros(fixed + num_staged, dtype=torch.int32, device=target)
        self._packed_head = self._packed[: fixed + _FEW_WORDS]
        self._steps = tuple(
            PackedStep(buffer.words, tables.num_groups, self._num_columns)
            for buffer in self._ring.buffers
        )

    def gather(
        self, plan: SchedulerOutput, states: RequestStates, shape: StepShape, num_logit_rows: int
    ) -> StepInputs:
        turn = self._ring.take()
        step, buffer = self._steps[turn], self._ring.buffers[turn]
        num_samples = self._pack_rows(step, plan)
        new_tokens = self._pack_tokens(step, plan, states)
        new_blocks = self._pack_blocks(step, plan, new_tokens)
        sizes = StepSizes(
            rows=len(plan.rows),
            tokens=int(step.starts[len(plan.rows)]),
            samples=num_samples,
            padded_rows=shape.num_rows,
            padded_tokens=shape.num_tokens,
            num_blocks=shape.num_blocks,
            block_size=self._block_size,
            new_tokens=new_tokens,
            new_blocks=new_blocks,
        )
        if new_tokens + new_blocks <= _FEW_WORDS:
            self._packed_head.copy_(buffer.head, non_blocking=True)
        else:
            self._packed.copy_(buffer.whole, non_blocking=True)
        self._kernel(
            self._packed,
            states.token_ids,
            self._device_tables,
            self._token_fields,
            self._row_fields,
            self._step_tables,
            sizes,
        )
        return self._inputs(shape, _lengths(plan, shape), (num_samples, num_logit_rows))

    def hold_until(self, event: Event | None) -> None:
        self._ring.hold_until(event)

    def close(self) -> None:
        self._ring.close()
        if self.rooms is not None:
            self.rooms.close()

    def _pack_rows(self, step: PackedStep, plan: SchedulerOutput) -> int:
        """Write the rows' fields; the number of samples."""
        num_rows = len(plan.rows)
        starts = step.starts[: num_rows + 1]
        starts[0] = 0
        np.cumsum(plan.num_scheduled_tokens, out=starts[1:])
        step.rows[:num_rows] = plan.rows
        step.computed[:num_rows] = plan.num_computed_tokens
        samples = self._counting[:num_rows]
        if not plan.samples.all():
            samples = samples[plan.samples]
        step.samples[: len(samples)] = samples
        return len(samples)

    def _pack_tokens(self, step: PackedStep, plan: SchedulerOutput, states: RequestStates) -> int:
        """Stage the tokens of new rows; their number.

        A prompt that finds no room is copied alone, before the step.
        """
        num_rows, used = len(plan.rows), 0
        step.fresh_counts[:num_rows] = 0
        if not states.fresh:
            return 0
        is_fresh = np.isin(plan.rows, list(states.fresh))
        for place in np.flatnonzero(is_fresh).tolist():
            row = int(plan.rows[place])
            tokens = states.fresh[row]
            end = used + len(tokens)
            if end > len(step.staged):
                states.write(row)
                continue
            step.staged[used:end] = tokens
            step.fresh_counts[place] = len(tokens)
            step.fresh_offsets[place] = step.staged_at + used
            del states.fresh[row]
            used = end
        return used

    def _pack_blocks(self, step: PackedStep, plan: SchedulerOutput, used: int) -> int:
        """Stage the changes of block tables behind ``used`` words; their number."""
        part = slice(0, len(plan.rows))
        if not self.tables.has_changes:
            step.block_first[:, part] = 0
            step.block_end[:, part] = 0
            return 0
        first, counts, ids = self.tables.take_changes(plan.rows)
        if used + len(ids) > len(step.staged):
            self._write_blocks(plan, first, counts)
            counts[:] = 0
            ids = ids[:0]
        step.staged[used : used + len(ids)] = ids
        step.block_first[:, part] = first
        np.add(first, counts, out=step.block_end[:, part])
        before = np.cumsum(counts).reshape(counts.shape) - counts
        step.block_offsets[:, part] = before + (step.staged_at + used)
        return len(ids)

    def _write_blocks(self, plan: SchedulerOutput, first: Int32, counts: Int32) -> None:
        """Write changes that find no room, by a copy for each row and group."""
        for group, place in np.argwhere(counts).tolist():
            row, start = int(plan.rows[place]), int(first[group, place])
            end = start + int(counts[group, place])
            # The host's table may change before the device has read it.
            ids = self.tables.tables[group, row, start:end].copy()
            self._device_tables[group, row, start:end].copy_(
                torch.from_numpy(ids), non_blocking=True
            )


def _lengths(plan: SchedulerOutput, shape: StepShape) -> HostLengths:
    counts = plan.num_scheduled_tokens
    seq_lens = plan.num_computed_tokens + counts
    padding = [0] * (shape.num_rows - len(counts))
    return HostLengths(
        query_lens=counts.tolist() + padding,
        seq_lens=seq_lens.tolist() + padding,
        max_query_len=int(counts.max()),
        max_seq_len=int(seq_lens.max()),
    )
