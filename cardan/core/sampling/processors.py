"""Runs the logits processors of plugins, so that a faulty one harms only the rows that asked."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from cardan.core.interfaces.logits import LogitsProcessor, RowAdded
from cardan.core.sampling.batch import BatchRows, put, take, uploaded
from cardan.core.types.sampling_params import SamplingParams
from cardan.core.types.step import Int64

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Member:
    """A row that some processors want.

    ``told`` are the processors that were told of the row, ``wanted_by`` those that took it.
    ``output`` is what ``RowAdded`` showed them, and grows; ``new_token`` is the token sampled last
    that they have not been told of yet.
    """

    told: list[int] = field(default_factory=list)
    wanted_by: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    new_token: int | None = None
    failure: str | None = None


class ProcessorChain:
    """Owns which rows each processor wants, and what was sampled for them.

    Costs nothing for rows that no processor wants. For the others sampled tokens are read back
    from the device in the next step that samples them.
    """

    def __init__(self, processors: Sequence[LogitsProcessor]) -> None:
        self._processors = tuple(processors)
        self._members: dict[int, _Member] = {}
        self._unread: list[tuple[list[int], Tensor]] = []
        self._logged: set[int] = set()

    def add(
        self, row: int, params: SamplingParams, prompt_token_ids: Int64, output_token_ids: Int64
    ) -> None:
        """Offer a row to all processors."""
        if not self._processors:
            return
        member = _Member(output=output_token_ids.tolist())
        added = RowAdded(row, params, tuple(prompt_token_ids.tolist()), member.output)
        for number, processor in enumerate(self._processors):
            try:
                if not processor.wants(params):
                    continue
                member.told.append(number)
                processor.update([added], [])
                member.wanted_by.append(number)
            except Exception as error:
                member.failure = self._failed(number, error)
        if member.wanted_by or member.failure:
            self._members[row] = member

    def remove(self, row: int) -> None:
        if row not in self._members:
            return
        self._read_back()
        member = self._members.pop(row)
        for number in member.told:
            try:
                self._processors[number].update([], [row])
            except Exception as error:
                self._failed(number, error)

    def select(self, batch: BatchRows) -> "ProcessorEdit | None":
        members = batch.members(self._members)
        if not members:
            return None
        calls = []
        for number in range(len(self._processors)):
            wanted = [place for place, member in members if number in member.wanted_by]
            if wanted:
                rows = {int(batch.rows[place]): i for i, place in enumerate(wanted)}
                calls.append(ProcessorCall(number, batch.index(wanted), tuple(wanted), rows))
        return ProcessorEdit(
            chain=self,
            calls=tuple(calls),
            rows=tuple(int(batch.rows[place]) for place, _ in members),
            index=batch.index([place for place, _ in members]),
            failures={place: member.failure for place, member in members if member.failure},
        )

    def take_new_tokens(self, rows: Sequence[int]) -> dict[int, int]:
        """Tokens sampled since these rows were processed last; waits for the device."""
        self._read_back()
        new_tokens = {}
        for row in rows:
            member = self._members[row]
            if member.new_token is not None:
                new_tokens[row] = member.new_token
                member.new_token = None
        return new_tokens

    def run(
        self, call: "ProcessorCall", logits: Tensor, new_tokens: dict[int, int]
    ) -> tuple[Tensor, str | None]:
        """One processor's work on its own rows [n, V]: the result, or why there is none."""
        try:
            result = self._processors[call.number].apply(logits, call.rows, new_tokens)
            if not isinstance(result, Tensor) or result.shape != logits.shape:
                shape = getattr(result, "shape", type(result).__name__)
                raise ValueError(f"apply returned {shape}, expected a tensor {logits.shape}")
            return result.to(logits), None
        except Exception as error:
            return logits, self._failed(call.number, error)

    def record(self, rows: Sequence[int], token_ids: Tensor) -> None:
        """Note tokens [n] sampled for rows, without waiting for them."""
        self._unread.append((list(rows), token_ids))

    def _read_back(self) -> None:
        for rows, token_ids in self._unread:
            for row, token in zip(rows, token_ids.tolist(), strict=True):
                self._members[row].new_token = token
                self._members[row].output.append(token)
        self._unread.clear()

    def _failed(self, number: int, error: Exception) -> str:
        name = getattr(self._processors[number], "name", type(self._processors[number]).__name__)
        if number not in self._logged:
            self._logged.add(number)
            _logger.error(
                "logits processor %s failed; requests that use it fail, others go on; "
                "further failures of it are not logged",
                name,
                exc_info=error,
            )
        return f"logits processor {name} failed: {type(error).__name__}: {error}"


@dataclass(frozen=True, slots=True)
class ProcessorCall:
    """A processor's rows in one batch: ``places`` there, ``rows`` maps rows to 0..n-1."""

    number: int
    index: Tensor | None
    places: tuple[int, ...]
    rows: dict[int, int]


@dataclass(frozen=True, slots=True)
class ProcessorEdit:
    """The processors' work on one batch. ``failures``: places of rows that failed on entering."""

    chain: ProcessorChain
    calls: tuple[ProcessorCall, ...]
    rows: tuple[int, ...]
    index: Tensor | None
    failures: dict[int, str]

    def apply(self, logits: Tensor) -> tuple[Tensor, dict[int, str]]:
        """Logits [S, V] (written in place or new), and the places that failed with the reason."""
        new_tokens = self.chain.take_new_tokens(self.rows)
        failures = dict(self.failures)
        for call in self.calls:
            told = {row: new_tokens[row] for row in call.rows if row in new_tokens}
            # A processor gets a copy of its own rows, so it cannot reach those of others.
            own = logits.clone() if call.index is None else take(logits, call.index)
            result, failure = self.chain.run(call, own, told)
            if failure is None:
                logits = put(logits, call.index, result)
            else:
                failures.update(dict.fromkeys(call.places, failure))
        return logits, failures

    def record(self, token_ids: Tensor) -> None:
        self.chain.record(self.rows, take(token_ids, self.index).clone())


def failure_mask(failures: dict[int, str], size: int, device: torch.device) -> Tensor:
    """[size] bool on the device, set at the places that failed."""
    mask = np.zeros(size, np.bool_)
    mask[list(failures)] = True
    return uploaded(mask, device)
