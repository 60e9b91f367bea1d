"""Repetition, presence and frequency penalties."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cardan.core.interfaces.kernels import Kernel, OpTable
from cardan.core.sampling.batch import BatchRows, take, uploaded
from cardan.core.types.sampling_params import SamplingParams
from cardan.core.types.step import Int64

_MIN_SLOTS = 4


@dataclass(frozen=True, slots=True)
class _Entry:
    slot: int
    repetition: float
    presence: float
    frequency: float


class Penalties:
    """Owns the token counts of the rows that have penalties.

    Such a row takes a slot of two tables, ``counts`` [slots, V] int32 of output tokens and
    ``prompt`` [slots, V] bool. The tables double when slots run out and go with the last row.
    """

    def __init__(self, max_num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._max_num_rows = max_num_rows
        self._vocab_size = vocab_size
        self._device = device
        self._entries: dict[int, _Entry] = {}
        self._free_slots: list[int] = []
        self._tables: tuple[Tensor, Tensor] | None = None

    def bind(self, ops: OpTable) -> Kernel:
        return ops.bind("apply_penalties", dtype="float32", vocab_size=self._vocab_size)

    def add(
        self, row: int, params: SamplingParams, prompt_token_ids: Int64, output_token_ids: Int64
    ) -> None:
        """Take up a row, whose tokens so far are given; ids outside the vocabulary are skipped."""
        if not params.has_penalties:
            return
        slot = self._new_slot()
        self._entries[row] = _Entry(
            slot, params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        )
        counts, prompt = self._allocated()
        counts[slot] = uploaded(self._counted(output_token_ids), self._device)
        prompt[slot] = uploaded(self._counted(prompt_token_ids) > 0, self._device)

    def remove(self, row: int) -> None:
        entry = self._entries.pop(row, None)
        if entry is None:
            return
        self._free_slots.append(entry.slot)
        if not self._entries:
            self._tables = None
            self._free_slots.clear()

    @property
    def num_bytes(self) -> int:
        return 0 if self._tables is None else sum(table.nbytes for table in self._tables)

    def select(self, batch: BatchRows, kernel: Kernel) -> "PenaltyEdit | None":
        members = batch.members(self._entries)
        if not members:
            return None
        entries = [entry for _, entry in members]
        counts, prompt = self._allocated()
        return PenaltyEdit(
            kernel=kernel,
            index=batch.index([place for place, _ in members]),
            slots=batch.upload([entry.slot for entry in entries]),
            counts=counts,
            prompt=prompt,
            ones=torch.ones(len(entries), dtype=torch.int32, device=self._device),
            factors=batch.upload(
                np.asarray([(e.repetition, e.presence, e.frequency) for e in entries]).T,
                torch.float32,
            ),
        )

    def _counted(self, token_ids: Int64) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
        known = token_ids[(token_ids >= 0) & (token_ids < self._vocab_size)]
        return np.bincount(known, minlength=self._vocab_size).astype(np.int32)

    def _allocated(self) -> tuple[Tensor, Tensor]:
        if self._tables is None:
            raise RuntimeError("penalty tables exist only while a row has penalties")
        return self._tables

    def _new_slot(self) -> int:
        if not self._free_slots:
            self._grow()
        return self._free_slots.pop()

    # Tables made in inference mode could not be written to outside it.
    @torch.inference_mode(False)
    def _grow(self) -> None:
        old = 0 if self._tables is None else len(self._tables[0])
        new = min(max(_MIN_SLOTS, 2 * old), self._max_num_rows)
        counts = torch.zeros(new, self._vocab_size, dtype=torch.int32, device=self._device)
        prompt = torch.zeros(new, self._vocab_size, dtype=torch.bool, device=self._device)
        if self._tables is not None:
            counts[:old].copy_(self._tables[0])
            prompt[:old].copy_(self._tables[1])
        self._tables = (counts, prompt)
        self._free_slots = list(range(new - 1, old - 1, -1))


@dataclass(frozen=True, slots=True)
class PenaltyEdit:
    """Penalise the rows at ``index`` of the batch; the tables belong to ``Penalties``.

    ``ones`` [M] int32 is what a sampled token adds to its count.
    """

    kernel: Kernel
    index: Tensor | None
    slots: Tensor
    counts: Tensor
    prompt: Tensor
    ones: Tensor
    factors: Tensor

    def apply(self, logits: Tensor, num_output_tokens: Int64) -> Tensor:
        self.kernel(logits, self.index, self.slots, self.prompt, self.counts, self.factors)
        return logits

    def record(self, token_ids: Tensor) -> None:
        where = (self.slots, take(token_ids, self.index))
        self.counts.index_put_(where, self.ones, accumulate=True)
