"""Books a step's result into the row table; array work for all rows, Python for changed ones."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from cardan.core.kvcache.manager import KVCacheManager
from cardan.core.scheduler.row_table import Int32, Rows, RowTable
from cardan.core.scheduler.sequence import Sequence
from cardan.core.types.outputs import ErrorKind, Finish, StepOutputs, TokenLogprobs
from cardan.core.types.request import FinishReason
from cardan.core.types.step import LogprobsArrays, ModelRunnerOutput, SchedulerOutput

Flags = npt.NDArray[np.bool_]
_CORRUPT = Finish(
    FinishReason.ERROR,
    message="the model's hidden states hold NaN or infinity; the request cannot be continued",
    kind="failed",
)


class Completion:
    """Applies results to rows that still belong to the sequence they were computed for."""

    def __init__(self, table: RowTable, cache: KVCacheManager) -> None:
        self._table = table
        self._cache = cache

    def apply(
        self, plan: SchedulerOutput, result: ModelRunnerOutput, outputs: StepOutputs
    ) -> Iterator[tuple[Sequence, Finish]]:
        """Append tokens to ``outputs`` and yield the sequences that end, still in their rows."""
        table, samples = self._table, plan.samples
        rows = plan.rows.astype(np.intp)
        alive = (table.keys[rows] == plan.keys) & (table.first_step[rows] <= plan.step_id)
        # Later steps may be in flight: only what this one computed is certain.
        computed = plan.num_computed_tokens + plan.num_scheduled_tokens
        self._add_chunks(plan, rows, alive, outputs)
        self._add_prompt_logprobs(plan, alive, result, outputs)
        sampling, counted = rows[samples], alive[samples]
        table.num_pending[sampling[counted]] -= 1
        failing = _places(counted & result.failed)
        corrupt: list[int] = []
        if len(failing):
            counted &= ~result.failed
        if result.corrupt is not None and np.count_nonzero(result.corrupt):
            corrupt = rows[alive & result.corrupt].tolist()
            counted &= ~result.corrupt[samples]
        ended = self._add_tokens(sampling, counted, result, outputs)
        failures = dict(zip(sampling[failing].tolist(), failing.tolist(), strict=True))
        # Found out in the chunk that holds it, before anybody can share what the chunk wrote.
        unsound = {*failures, *corrupt}
        self._register(rows[alive], computed[alive], unsound)
        if len(sampling) < len(rows):
            scored = alive & ~samples
            ended += self._prompt_only(rows[scored], computed[scored], unsound)
        ended += [(row, _failure(result, place)) for row, place in failures.items()]
        ended += [(row, _CORRUPT) for row in corrupt if row not in failures]
        # Rows are looked up before any of them is released.
        return iter([(table.sequence(row), finish) for row, finish in ended])

    def _add_chunks(
        self, plan: SchedulerOutput, rows: Rows, alive: Flags, outputs: StepOutputs
    ) -> None:
        """Report rows that were catching up; a row that only decodes is none of them."""
        catching_up = alive & (plan.num_computed_tokens < self._table.num_entry[rows])
        if np.count_nonzero(catching_up):
            keys = plan.keys[catching_up].tolist()
            counts = plan.num_scheduled_tokens[catching_up].tolist()
            outputs.chunks.update(zip(keys, counts, strict=True))

    def _add_tokens(
        self, rows: Rows, counted: Flags, result: ModelRunnerOutput, outputs: StepOutputs
    ) -> list[tuple[int, Finish]]:
        """Append the tokens of ``counted`` rows, of which a step may yield several."""
        ended: list[tuple[int, Finish]] = []
        for column in range(result.token_ids.shape[1]):
            use = counted & (result.num_sampled > column)
            if ended:
                # A row that stopped at an earlier column takes no further token.
                use[np.isin(rows, [row for row, _finish in ended])] = False
            if np.count_nonzero(use):
                taken, token_ids = rows[use], result.token_ids[use, column]
                ended += self._append(taken, token_ids, outputs)
                if result.logprobs:
                    wanting = taken[self._table.wants_logprobs[taken]]
                    self._add_logprobs(wanting, result, column, outputs)
        return ended

    def _append(
        self, rows: Rows, token_ids: Int32, outputs: StepOutputs
    ) -> list[tuple[int, Finish]]:
        """One more token for each row; returns the rows that it ends."""
        table = self._table
        count = table.num_tokens[rows]
        table.token_ids[rows, count] = token_ids
        count += 1
        table.num_tokens[rows] = count
        outputs.keys.extend(table.keys[rows].tolist())
        outputs.token_ids.extend(token_ids.tolist())
        ended = count >= table.limit[rows]
        stopped = table.stops(rows, token_ids)
        if stopped is not None:
            ended |= stopped
        if not np.count_nonzero(ended):
            return []
        return [
            (int(rows[place]), self._stop(int(rows[place]), int(token_ids[place])))
            if stopped is not None and stopped[place]
            else (int(rows[place]), Finish(FinishReason.LENGTH))
            for place in _places(ended)
        ]

    def _stop(self, row: int, token_id: int) -> Finish:
        is_eos = token_id in self._table.sequence(row).request.eos_token_ids
        return Finish(FinishReason.STOP, None if is_eos else token_id)

    def _add_logprobs(
        self, rows: Rows, result: ModelRunnerOutput, column: int, outputs: StepOutputs
    ) -> None:
        for row in rows.tolist():
            entry = _table_row(result.logprobs[row], column)
            outputs.logprobs.setdefault(int(self._table.keys[row]), []).append(entry)

    def _add_prompt_logprobs(
        self,
        plan: SchedulerOutput,
        alive: npt.NDArray[np.bool_],
        result: ModelRunnerOutput,
        outputs: StepOutputs,
    ) -> None:
        if not result.prompt_logprobs:
            return
        for place in np.flatnonzero(alive):
            arrays = result.prompt_logprobs.get(int(plan.rows[place]))
            if arrays is None:
                continue
            sequence = self._table.sequence(int(plan.rows[place]))
            # After a preemption positions are computed again that were delivered before.
            known = sequence.num_prompt_logprobs - int(plan.num_computed_tokens[place])
            tables = [_table_row(arrays, i) for i in range(max(known, 0), len(arrays.ranks))]
            sequence.num_prompt_logprobs += len(tables)
            outputs.prompt_logprobs.setdefault(sequence.key, []).extend(tables)

    def _register(self, rows: Rows, computed: Int32, unsound: set[int]) -> None:
        """Make blocks findable whose tokens are all known and computed."""
        table, size = self._table, self._cache.block_size
        known = np.minimum(computed, table.num_tokens[rows])
        behind = known - table.num_registered[rows] >= size
        if not np.count_nonzero(behind):
            return
        for row, count in zip(rows[behind].tolist(), known[behind].tolist(), strict=True):
            if row not in unsound:
                blocks = table.sequence(row).blocks
                self._cache.register(blocks, table.token_ids[row, :count], count)
                table.num_registered[row] = blocks.num_registered * size

    def _prompt_only(
        self, rows: Rows, computed: Int32, unsound: set[int]
    ) -> list[tuple[int, Finish]]:
        """Rows that were to compute their prompt and nothing else, and have."""
        table = self._table
        done = (table.num_tokens[rows] >= table.limit[rows]) & (computed >= table.limit[rows] - 1)
        finish = Finish(FinishReason.LENGTH)
        return [(row, finish) for row in rows[done].tolist() if row not in unsound]


def _places(flags: Flags) -> Rows:
    return flags.nonzero()[0]


def _failure(result: ModelRunnerOutput, place: int) -> Finish:
    message = result.failures.get(place, "the step yielded no token for this request")
    kind: ErrorKind = "invalid" if place in result.infeasible else "failed"
    return Finish(FinishReason.ERROR, message=message, kind=kind)


def _table_row(arrays: LogprobsArrays, place: int) -> TokenLogprobs:
    top = arrays.token_ids.shape[1] - 1
    return TokenLogprobs(
        token_ids=arrays.token_ids[place].tolist(),
        logprobs=arrays.logprobs[place].tolist(),
        ranks=[int(arrays.ranks[place]), *range(1, top + 1)],
    )
