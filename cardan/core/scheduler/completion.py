"""Books a step's result into the row table; array work for all rows, Python for changed ones."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from cardan.core.kvcache.manager import KVCacheManager
from cardan.core.scheduler.row_table import RowTable
from cardan.core.scheduler.sequence import Sequence
from cardan.core.types.outputs import ErrorKind, Finish, StepOutputs, TokenLogprobs
from cardan.core.types.request import FinishReason
from cardan.core.types.step import LogprobsArrays, ModelRunnerOutput, SchedulerOutput

Rows = npt.NDArray[np.int32]
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
        table = self._table
        alive = (table.keys[plan.rows] == plan.keys) & (table.first_step[plan.rows] <= plan.step_id)
        # Later steps may be in flight: only what this one computed is certain.
        computed = plan.num_computed_tokens + plan.num_scheduled_tokens
        rows = plan.rows[plan.samples]
        counted = alive[plan.samples] & ~result.failed
        if result.corrupt is not None:
            counted &= ~result.corrupt[plan.samples]
        self._add_chunks(plan, alive, outputs)
        self._add_prompt_logprobs(plan, alive, result, outputs)
        failing = np.flatnonzero(alive[plan.samples] & result.failed)
        # Found out in the chunk that holds it, before anybody can share what the chunk wrote.
        corrupt = self._corrupt(plan, alive, result)
        table.num_pending[rows[alive[plan.samples]]] -= 1
        ended: list[tuple[int, Finish]] = []
        for column in range(result.token_ids.shape[1]):
            use = counted & (result.num_sampled > column)
            # A row that stopped at an earlier column takes no further token.
            use[np.isin(rows, [row for row, _finish in ended])] = False
            if use.any():
                ended += self._append(rows, use, result, column, outputs)
        unsound = np.concatenate([rows[failing], corrupt])
        self._register(plan.rows[alive], computed[alive], unsound)
        scored = alive & ~plan.samples & ~np.isin(plan.rows, corrupt)
        ended += self._prompt_only(plan.rows[scored], computed[scored])
        ended += [(int(rows[place]), _failure(result, int(place))) for place in failing]
        ended += [(int(row), _CORRUPT) for row in corrupt if row not in rows[failing]]
        # Rows are looked up before any of them is released.
        return iter([(table.sequence(row), finish) for row, finish in ended])

    def _add_chunks(
        self, plan: SchedulerOutput, alive: npt.NDArray[np.bool_], outputs: StepOutputs
    ) -> None:
        """Report rows that were catching up; a row that only decodes is none of them."""
        catching_up = alive & (plan.num_computed_tokens < self._table.num_entry[plan.rows])
        if catching_up.any():
            keys = plan.keys[catching_up].tolist()
            counts = plan.num_scheduled_tokens[catching_up].tolist()
            outputs.chunks.update(zip(keys, counts, strict=True))

    @staticmethod
    def _corrupt(
        plan: SchedulerOutput, alive: npt.NDArray[np.bool_], result: ModelRunnerOutput
    ) -> Rows:
        if result.corrupt is None:
            return plan.rows[:0]
        return plan.rows[alive & result.corrupt]

    def _append(
        self,
        rows: Rows,
        use: npt.NDArray[np.bool_],
        result: ModelRunnerOutput,
        column: int,
        outputs: StepOutputs,
    ) -> list[tuple[int, Finish]]:
        table = self._table
        taken = rows[use]
        token_ids = result.token_ids[use, column]
        table.token_ids[taken, table.num_tokens[taken]] = token_ids
        table.num_tokens[taken] += 1
        outputs.keys.extend(table.keys[taken].tolist())
        outputs.token_ids.extend(token_ids.tolist())
        if result.logprobs:
            self._add_logprobs(taken[table.wants_logprobs[taken]], result, column, outputs)
        stopped = table.stops(taken, token_ids)
        full = table.num_tokens[taken] >= table.limit[taken]
        ended = []
        for place in np.flatnonzero(stopped | full):
            row = int(taken[place])
            if stopped[place]:
                ended.append((row, self._stop(row, int(token_ids[place]))))
            else:
                ended.append((row, Finish(FinishReason.LENGTH)))
        return ended

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

    def _register(self, rows: Rows, computed: Rows, failed: Rows) -> None:
        """Make blocks findable whose tokens are all known and computed."""
        table, size = self._table, self._cache.block_size
        known = np.minimum(computed, table.num_tokens[rows])
        behind = known - known % size > table.num_registered[rows]
        for row, count in zip(rows[behind].tolist(), known[behind].tolist(), strict=True):
            if row in failed:
                continue
            sequence = table.sequence(row)
            self._cache.register(sequence.blocks, table.token_ids[row, :count], count)
            table.sync_blocks(sequence)

    def _prompt_only(self, rows: Rows, computed: Rows) -> list[tuple[int, Finish]]:
        """Rows that were to compute their prompt and nothing else, and have."""
        table = self._table
        done = (table.num_tokens[rows] >= table.limit[rows]) & (computed >= table.limit[rows] - 1)
        return [(int(row), Finish(FinishReason.LENGTH)) for row in rows[done]]


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
