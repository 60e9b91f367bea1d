"""Plans steps and books their results.

There is no prefill and no decode phase: every running row has tokens that are known and tokens that
are computed, and a step lets the computed ones catch up as far as the token budget goes. Chunked
prefill, prefix hits and preemption need no branch of their own. ``schedule`` may run ahead of
``update`` by as many steps as the engine keeps in flight.
"""

import time
from collections.abc import Callable

import numpy as np

from cardan.core.config.fallbacks import chosen
from cardan.core.config.scheduler import SchedulerConfig
from cardan.core.interfaces.scheduling import RequestView
from cardan.core.kvcache.manager import KVCacheManager
from cardan.core.scheduler.completion import Completion
from cardan.core.scheduler.intake import Intake
from cardan.core.scheduler.queues import RunningSet, WaitingQueue
from cardan.core.scheduler.row_table import Int32, Rows, RowTable
from cardan.core.scheduler.sequence import Sequence
from cardan.core.scheduler.shares import Shares, share_tokens
from cardan.core.scheduler.step_builder import StepBuilder
from cardan.core.types.errors import ConfigError
from cardan.core.types.outputs import EngineStats, Finish, Started, StepOutputs
from cardan.core.types.request import EngineRequest, FinishReason
from cardan.core.types.step import ModelRunnerOutput, SchedulerOutput

EndListener = Callable[[RequestView, Finish], None]


class Scheduler:
    """Owner of all live sequences, their rows, and (through the manager) their blocks."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: KVCacheManager,
        intake: Intake,
        max_model_len: int,
        max_step_tokens: int,
        on_end: EndListener | None = None,
    ) -> None:
        """``on_end`` is told of each sequence that ends, before the outputs are taken."""
        chunked = chosen(config.enable_chunked_prefill, "scheduler.enable_chunked_prefill")
        threshold = chosen(
            config.long_prefill_token_threshold, "scheduler.long_prefill_token_threshold"
        )
        if not chunked:
            _check_whole_prompts(threshold, max_model_len, max_step_tokens)
        self._is_chunked = chunked
        self._threshold = threshold
        self._cache = cache
        self._intake = intake
        self._max_step_tokens = max_step_tokens
        self._mixed_budget = config.mixed_prefill_token_budget if chunked else None
        self._waiting = WaitingQueue()
        self._running = RunningSet()
        self._table = RowTable(
            chosen(config.max_num_seqs, "scheduler.max_num_seqs"), max_model_len, cache.block_size
        )
        self._sequences: dict[int, Sequence] = {}
        self._freed_rows: list[int] = []
        self._step_id = 0
        self._outputs = StepOutputs()
        self._stats = EngineStats()
        self._completion = Completion(self._table, cache)
        self._on_end = on_end

    # -- requests in and out -------------------------------------------------------------------

    def add(self, request: EngineRequest) -> None:
        """Take a request; the exceptions are those of ``Intake.accept``."""
        sequences = self._intake.accept(
            request, len(self._waiting), self._waiting.num_tokens, len(self._running)
        )
        for sequence in sequences:
            self._sequences[sequence.key] = sequence
            if sequence.num_to_compute <= 0:
                # Nothing to compute: one prompt token, none to generate.
                self._outputs.started[sequence.key] = Started(0, time.monotonic())
                self._finish(sequence, Finish(FinishReason.LENGTH))
            else:
                self._waiting.push(sequence)

    def abort(self, key: int) -> None:
        """End one sequence now; unknown keys (already finished) are ignored."""
        sequence = self._sequences.get(key)
        if sequence is not None:
            self._finish(sequence, Finish(FinishReason.ABORT))

    def abort_all(self) -> None:
        """End every sequence now."""
        for sequence in list(self._sequences.values()):
            self._finish(sequence, Finish(FinishReason.ABORT))

    def fail_all(self, message: str) -> None:
        """End every sequence with an error."""
        for sequence in list(self._sequences.values()):
            self._finish(sequence, Finish(FinishReason.ERROR, message=message, kind="failed"))

    @property
    def has_work(self) -> bool:
        """Whether ``schedule`` may yield a plan or ``take_outputs`` has news."""
        return bool(self._sequences or self._freed_rows) or not self._outputs.is_empty

    @property
    def num_live(self) -> int:
        return len(self._sequences)

    def take_outputs(self) -> StepOutputs:
        """Everything to tell the clients since the last call, statistics included."""
        outputs, self._outputs = self._outputs, StepOutputs()
        stats, self._stats = self._stats, EngineStats()
        stats.num_running = len(self._running)
        stats.num_waiting = len(self._waiting)
        stats.kv_usage = self._cache.usage
        stats.last_step_time = time.monotonic()
        outputs.stats = stats
        return outputs

    # -- planning ------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput | None:
        """The next step's plan, or None when no row can advance (yet)."""
        # With a step ahead, the device computes the prompts of the last plan meanwhile.
        self._cache.name_announced()
        step = StepBuilder(self._cache.num_groups, self._max_step_tokens)
        shares = self._share(step.budget)
        if self._plan_running(step, shares):
            long_rows = shares.rows[shares.long_places].tolist()
            long_prompts = [self._table.sequence(row) for row in long_rows]
            self._admit(step)
            self._top_up(step, shares, long_prompts)
        freed, self._freed_rows = self._freed_rows, []
        plan = step.build(self._step_id, freed, self._table)
        if not len(plan.rows) and not freed:
            return None
        self._step_id += 1
        self._stats.num_steps += 1
        self._stats.num_batched_tokens += plan.num_tokens
        return plan

    def _share(self, budget: int) -> Shares:
        """How running rows share the step with each other and with new sequences."""
        rows = self._running.rows
        needs = self._table.need(rows)
        if threshold := self._threshold:
            needs = np.minimum(needs, threshold)
        return share_tokens(rows, needs, budget, self._mixed_budget)

    def _plan_running(self, step: StepBuilder, shares: Shares) -> bool:
        """Give running rows their tokens; False when one had to be preempted."""
        if not len(shares.rows):
            return True
        step.add_shares(shares)
        after = self._table.num_computed[shares.rows] + shares.counts
        outgrown = after > self._table.capacity[shares.rows]
        if not np.count_nonzero(outgrown):
            return True
        return self._grow(step, shares.rows[outgrown], after[outgrown])

    def _top_up(self, step: StepBuilder, shares: Shares, long_prompts: list[Sequence]) -> None:
        """Give long prompts what new sequences left, as far as free blocks go."""
        for place, sequence in zip(shares.long_places.tolist(), long_prompts, strict=True):
            count = int(shares.counts[place])
            more = min(int(shares.needs[place]) - count, step.budget)
            # It may have been preempted for one that was admitted.
            if more > 0 and sequence.is_running:
                row = np.array([sequence.row], np.intp)
                num_tokens = self._table.num_computed[row] + (count + more)
                outgrown = bool(num_tokens > self._table.capacity[row])
                if outgrown and not self._extend(step, row, num_tokens):
                    return
                step.add_tokens(sequence.row, more)

    def _grow(self, step: StepBuilder, rows: Rows, num_tokens: Int32) -> bool:
        """Give rows blocks for ``num_tokens``, preempting the last row if they lack."""
        if self._extend(step, rows, num_tokens):
            return True
        growing = [(self._table.sequence(row), place) for place, row in enumerate(rows.tolist())]
        had_room = True
        for sequence, place in sorted(growing, key=lambda pair: pair[0].order):
            one = slice(place, place + 1)
            while sequence.is_running and not self._extend(step, rows[one], num_tokens[one]):
                had_room = False
                self._preempt(step, self._running.last)
        return had_room

    def _extend(self, step: StepBuilder, rows: Rows, num_tokens: Int32) -> bool:
        """Give rows blocks for so many tokens, more than they have, or none of them any."""
        table, size = self._table, self._cache.block_size
        first = table.capacity[rows] // size
        last = -(-num_tokens // size)
        counts = last - first
        sequences = [table.sequence(row).blocks for row in rows.tolist()]
        added = self._cache.grow(sequences, counts.tolist())
        if added is None:
            return False
        step.add_blocks(rows, first, counts, added)
        table.capacity[rows] = last * size
        return True

    def _preempt(self, step: StepBuilder, sequence: Sequence) -> None:
        """Take everything from a running sequence; it will be computed again from its tokens."""
        step.drop_row(sequence.row)
        self._release_row(sequence)
        self._cache.free(sequence.blocks)
        self._waiting.push(sequence)
        self._outputs.preempted.append(sequence.key)
        self._stats.num_preemptions += 1

    def _release_row(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._freed_rows.append(self._table.remove(sequence))

    # -- admission -----------------------------------------------------------------------------

    def _admit(self, step: StepBuilder) -> None:
        place = num_kept_blocks = 0
        while place < len(self._waiting) and step.budget > 0:
            sequence = self._waiting[place]
            # Those passed over, ``place`` of them, will need a row each.
            has_row = self._table.num_free > place
            if self._waits_for_parent(sequence):
                place += 1
            elif not has_row and not self._outranks_last(sequence):
                return
            elif self._waits_for_prefix(sequence):
                # What comes after it leaves it the blocks that it would have taken now.
                place += 1
                num_kept_blocks += self._cache.blocks_for(sequence.num_to_compute)
            elif not (has_row and self._try_start(step, sequence, num_kept_blocks)):
                if not self._outranks_last(sequence):
                    return
                self._preempt(step, self._running.last)

    def _waits_for_parent(self, sequence: Sequence) -> bool:
        """Whether the first sample is still computing the prompt that this one will share."""
        parent = sequence.parent
        if parent is None or parent.is_finished or sequence.is_started:
            return False
        return not parent.is_running or not self._has_prompt(parent)

    def _has_prompt(self, sequence: Sequence) -> bool:
        """Whether the prompt is computed, and a token from it shows that it did not fail."""
        table, row, num_prompt = self._table, sequence.row, sequence.num_prompt_tokens
        return bool(table.num_computed[row] >= num_prompt and table.num_tokens[row] > num_prompt)

    def _waits_for_prefix(self, sequence: Sequence) -> bool:
        """Whether one that goes first is about to compute the block that this one lacks first.

        Only a hint: blocks are shared when they are registered, and if the other one ends or is
        preempted before, this one computes them itself.
        """
        if sequence.lacks_prompt_logprobs:
            return False
        wanted = sequence.token_ids[: sequence.num_to_compute]
        key = self._cache.announcer_of_next(sequence.blocks, wanted)
        return key is not None and self._sequences[key].order < sequence.order

    def _outranks_last(self, sequence: Sequence) -> bool:
        """Whether the policy puts a sequence strictly before a running one, which can go."""
        return bool(len(self._running)) and self._running.last.order[0] > sequence.order[0]

    def _try_start(self, step: StepBuilder, sequence: Sequence, num_kept_blocks: int) -> bool:
        """Move a waiting sequence into a free row if budget and blocks allow."""
        start = self._fork_parent(step, sequence)
        if start is None:
            start = self._attach_prefix(sequence, num_kept_blocks)
        if start is None:
            return False
        num_computed, num_cached = start
        need = sequence.num_to_compute - num_computed
        count = min(need, step.budget)
        if threshold := self._threshold:
            count = min(count, threshold)
        is_whole = self._is_chunked or count == need
        if not is_whole or self._cache.extend(sequence.blocks, num_computed + count) is None:
            self._cache.free(sequence.blocks)
            return False
        self._start(step, sequence, num_computed, count)
        self._note_start(sequence, num_cached)
        return True

    def _start(self, step: StepBuilder, sequence: Sequence, num_computed: int, count: int) -> None:
        self._waiting.remove(sequence)
        row = self._table.add(sequence, num_computed, self._step_id)
        self._running.add(sequence)
        to_compute = sequence.token_ids[: sequence.num_to_compute]
        self._cache.announce(sequence.blocks, to_compute, sequence.key)
        step.add_sequence(sequence, num_computed)
        step.add_row(row, count)

    def _fork_parent(self, step: StepBuilder, sequence: Sequence) -> tuple[int, int] | None:
        """Share the prompt blocks of the first sample. Returns computed and cached tokens."""
        parent = sequence.parent
        if parent is None or sequence.is_started or not parent.is_running:
            return None
        if self._has_prompt(parent) and self._cache.num_free >= 2:
            # The last prompt token is computed again, for its logits.
            num_tokens = sequence.num_prompt_tokens - 1
            copies = self._cache.fork(parent.blocks, sequence.blocks, num_tokens)
            if copies is not None:
                step.add_copies(copies)
                return num_tokens, num_tokens
        return None

    def _attach_prefix(self, sequence: Sequence, num_kept_blocks: int) -> tuple[int, int] | None:
        """Share cached blocks, if the rest of the known tokens fits into free ones.

        Prompt log-probabilities need every position's logits, which no cache holds, so such a
        request computes its whole prompt.
        """
        cache = self._cache
        if sequence.lacks_prompt_logprobs:
            prefix = None
            num_hit = num_hit_free = 0
        else:
            # Short of the last token to compute, or the row would have nothing to do.
            wanted = sequence.token_ids[: sequence.num_to_compute]
            prefix = cache.find_cached(sequence.blocks, wanted)
            num_hit, num_hit_free = prefix.num_blocks, prefix.num_free
        missing = cache.blocks_for(sequence.num_to_compute) - num_hit
        # One block for each row that can still grow keeps an admission from causing a
        # preemption at once. Alone, a sequence always starts.
        reserve = num_kept_blocks + self._table.num_growing
        if len(self._running) and missing + num_hit_free + reserve > cache.num_free:
            return None
        if prefix is not None:
            cache.attach(sequence.blocks, prefix)
        num_computed = num_hit * cache.block_size
        return num_computed, num_computed

    def _note_start(self, sequence: Sequence, num_cached: int) -> None:
        if sequence.is_started:
            return
        sequence.is_started = True
        self._stats.prefix_queries += sequence.num_prompt_tokens
        self._stats.prefix_hits += num_cached
        self._outputs.started[sequence.key] = Started(num_cached, time.monotonic())

    # -- results -------------------------------------------------------------------------------

    def update(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Book a step's result: append tokens, finish sequences, make full blocks findable.

        Results for rows whose sequence has left meanwhile are dropped.
        """
        for sequence, finish in self._completion.apply(plan, result, self._outputs):
            self._finish(sequence, finish)

    def fail(self, plan: SchedulerOutput, message: str) -> None:
        """End the sequences of a step that could not be run, the newest one."""
        table = self._table
        rows = plan.rows[table.keys[plan.rows] == plan.keys].tolist()
        for sequence in [table.sequence(row) for row in rows]:
            self._finish(sequence, Finish(FinishReason.ERROR, message=message, kind="failed"))

    def _finish(self, sequence: Sequence, finish: Finish) -> None:
        del self._sequences[sequence.key]
        sequence.is_finished = True
        if sequence.is_running:
            self._release_row(sequence)
        elif sequence.num_to_compute > 0:
            self._waiting.remove(sequence)
        self._cache.free(sequence.blocks, forget=finish.kind == "failed")
        self._outputs.finished[sequence.key] = finish
        if self._on_end is not None:
            self._on_end(sequence.view, finish)


def _check_whole_prompts(threshold: int, max_model_len: int, max_step_tokens: int) -> None:
    """Without chunks every prompt, also one that returns after a preemption, must fit a step."""
    if max_step_tokens < max_model_len:
        raise ConfigError(
            f"without chunked prefill a step must hold the longest prompt, it holds "
            f"{max_step_tokens} tokens. Remedies: scheduler.max_num_batched_tokens of at least "
            f"{max_model_len}, a smaller --max-model-len, or chunked prefill"
        )
    if threshold:
        raise ConfigError(
            "scheduler.long_prefill_token_threshold splits prompts and needs chunked prefill. "
            "Remedies: set it to 0, or enable chunked prefill"
        )
