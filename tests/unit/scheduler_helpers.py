"""A simulated device with paged memory, and a driver that runs a scheduler on it.

The "model": each token's KV is a digest of the domain and all tokens up to it; the next token is
a hash of that digest and the sequence's seed. The device applies plans literally and refuses to
compute on a position whose slots do not hold the right digest, so a lost block, a stale share, a
missing copy or a wrong slot shows at once.
"""

from collections import Counter, deque
from dataclasses import dataclass

import numpy as np

from cardan.core.config.scheduler import SchedulerConfig
from cardan.core.kvcache.manager import KVCacheManager
from cardan.core.scheduler.intake import Intake
from cardan.core.scheduler.scheduler import Scheduler
from cardan.core.types.kv import KVCacheConfig, KVCacheGroup, KVCacheSpec
from cardan.core.types.request import EngineRequest, FinishReason
from cardan.core.types.sampling_params import SamplingParams
from cardan.core.types.step import LogprobsArrays, ModelRunnerOutput
from cardan.plugins.policies import FirstComePolicy, PriorityPolicy

VOCAB = 23
EOS = 3
EMPTY, POISON = 0, -1
FAILURE = "the logits are not numbers"


class Stream:
    """Digests of the tokens of one sequence."""

    def __init__(self, request):
        self.media = request.media
        self.start = hash_of(f"{request.cache_salt!r} {request.adapter!r}")
        self.values = []

    def upto(self, token_ids):
        for position in range(len(self.values), len(token_ids)):
            previous = self.values[-1] if self.values else self.start
            shown = [
                (hash_of(span.key), span.length, position - span.offset)
                for span in self.media
                if span.offset <= position < span.offset + span.length
            ]
            value = hash((previous, int(token_ids[position]), *shown))
            self.values.append(value | 1)  # never EMPTY; POISON is as unlikely as any other
        return self.values


def hash_of(text):
    return int.from_bytes(text.encode(), "little")


def sample(value, seed):
    return (hash((value, seed)) >> 7) % VOCAB


def reference(request, index=0):
    """Tokens, reason and stop token of sample ``index``, generated alone and one by one."""
    params = request.params
    seed = params.seed + index
    stream = Stream(request)
    answer = []
    while len(answer) < request.max_tokens:
        token_id = sample(stream.upto([*request.prompt_token_ids, *answer])[-1], seed)
        answer.append(token_id)
        if len(answer) > params.min_tokens:
            if token_id in request.eos_token_ids and (
                not params.ignore_eos or token_id in params.stop_token_ids
            ):
                return answer, FinishReason.STOP, None
            if token_id in params.stop_token_ids:
                return answer, FinishReason.STOP, token_id
    return answer, FinishReason.LENGTH, None


@dataclass
class DeviceRow:
    key: int
    tokens: list
    num_prompt: int
    params: SamplingParams
    seed: int
    stream: Stream
    is_bad: bool = False

    def known_digests(self):
        return self.stream.upto(self.tokens)


class FakeDevice:
    """Executes plans on a simulated paged memory, in the order in which it gets them."""

    def __init__(self, num_groups, num_blocks, block_size, max_rows):
        self.block_size = block_size
        self.memory = [np.zeros((num_blocks, block_size), np.int64) for _ in range(num_groups)]
        self.tables = [np.full((max_rows, num_blocks), -1, np.int64) for _ in range(num_groups)]
        self.rows = [None] * max_rows
        self.requests = {}
        self.failed_keys = Counter()
        self.next_step = 0

    def execute(self, plan, fails=lambda key: False):
        assert plan.step_id == self.next_step
        self.next_step += 1
        self._apply(plan)
        work = list(
            zip(
                plan.rows.tolist(),
                plan.num_computed_tokens.tolist(),
                plan.num_scheduled_tokens.tolist(),
                plan.samples.tolist(),
                plan.keys.tolist(),
                strict=True,
            )
        )
        for row, start, _count, _samples, key in work:
            assert self.rows[row] is not None, f"row {row} is empty"
            assert self.rows[row].key == key
            self._check(row, start)
        bad = {row for row, *_rest, samples, key in work if samples and fails(key)}
        self._write(work, bad)
        for row, start, count, *_rest in work:
            if row not in bad:
                self._check(row, start + count)
        return self._results(work, bad)

    def _apply(self, plan):
        for row in plan.freed_rows:
            assert self.rows[row] is not None, f"row {row} freed twice"
            self.rows[row] = None
            for table in self.tables:
                table[row] = -1
        for new in plan.new_rows:
            assert self.rows[new.row] is None, f"row {new.row} is taken"
            self.rows[new.row] = DeviceRow(
                new.key,
                new.token_ids.tolist(),
                new.num_prompt_tokens,
                new.params,
                new.seed,
                Stream(self.requests[new.key]),
            )
            for table, ids in zip(self.tables, new.block_ids, strict=True):
                table[new.row, : len(ids)] = ids
        for table, edits in zip(self.tables, plan.block_edits, strict=True):
            for row in edits.rows.tolist():
                assert self.rows[row] is not None
            table[edits.rows, edits.columns] = edits.block_ids
        for memory, copies in zip(self.memory, plan.block_copies, strict=True):
            assert not set(copies.sources.tolist()) & set(copies.targets.tolist())
            assert len(set(copies.targets.tolist())) == len(copies.targets)
            memory[copies.targets] = memory[copies.sources]

    def _check(self, row, stop):
        state = self.rows[row]
        if state.is_bad or stop == 0:
            return
        columns = -(-stop // self.block_size)
        expected = np.array(state.known_digests()[:stop], np.int64)
        assert len(expected) == stop, f"row {row} computes tokens that it does not have"
        for memory, table in zip(self.memory, self.tables, strict=True):
            ids = table[row, :columns]
            assert (ids > 0).all(), f"row {row} lacks a block: {ids}"
            content = memory[ids].reshape(-1)[:stop]
            wrong = np.flatnonzero(content != expected)
            assert not len(wrong), f"key {state.key} row {row}: wrong content at {wrong.tolist()}"

    def _write(self, work, bad):
        for memory, table in zip(self.memory, self.tables, strict=True):
            written = set()
            for row, start, count, *_rest in work:
                state = self.rows[row]
                if row not in bad and not state.is_bad:
                    assert start + count <= len(state.tokens)
                for position in range(start, start + count):
                    block = int(table[row, position // self.block_size])
                    slot = (block, position % self.block_size)
                    assert block > 0, f"row {row} writes without a block at {position}"
                    assert slot not in written, f"slot {slot} is written twice in a step"
                    written.add(slot)
                    is_good = row not in bad and not state.is_bad
                    memory[slot] = state.known_digests()[position] if is_good else POISON

    def _results(self, work, bad):
        token_ids, failed, logprobs, prompt = [], [], {}, {}
        for row, start, count, samples, key in work:
            state = self.rows[row]
            stop = start + count
            if state.params.prompt_logprobs is not None:
                positions = np.arange(start + 1, min(stop + 1, state.num_prompt), dtype=np.int32)
                if len(positions):
                    prompt[row] = _arrays([state.tokens[p] for p in positions], positions)
            if not samples:
                continue
            if row in bad:
                state.is_bad = True
                self.failed_keys[key] += 1
            failed.append(state.is_bad)
            token_id = 0 if state.is_bad else sample(state.known_digests()[stop - 1], state.seed)
            assert state.is_bad or stop == len(state.tokens)
            state.tokens.append(token_id)
            token_ids.append(token_id)
            if state.params.logprobs is not None and not state.is_bad:
                logprobs[row] = _arrays([token_id], np.array([stop], np.int32))
        return ModelRunnerOutput(
            token_ids=np.array(token_ids, np.int32).reshape(-1, 1),
            num_sampled=np.array([0 if bad else 1 for bad in failed], np.int32),
            failed=np.array(failed, np.bool_),
            failures={place: FAILURE for place, is_bad in enumerate(failed) if is_bad},
            logprobs=logprobs,
            prompt_logprobs=prompt,
        )


def _arrays(token_ids, positions):
    """A table whose values tell their position."""
    ids = np.stack([np.array(token_ids, np.int32), np.full(len(positions), 1, np.int32)], axis=1)
    values = np.stack([-positions, -positions - 1], axis=1).astype(np.float32)
    return LogprobsArrays(ids, values, positions)


def kv_config(num_blocks=65, block_size=4, num_groups=1):
    groups = tuple(
        KVCacheGroup((index,), KVCacheSpec("full", block_size, 1 + index, 2, 2, "float32"))
        for index in range(num_groups)
    )
    return KVCacheConfig(groups, num_blocks)


def make_request(key, prompt, max_tokens=4, **kwargs):
    """A request with a seed; keywords go to the sampling parameters if these know them."""
    names = ("n", "min_tokens", "stop_token_ids", "ignore_eos", "logprobs", "prompt_logprobs")
    sampling = {name: kwargs.pop(name) for name in names if name in kwargs}
    if max_tokens or "prompt_logprobs" in sampling:
        sampling["max_tokens"] = max_tokens
    params = SamplingParams(seed=kwargs.pop("seed", key), **sampling)
    return EngineRequest(
        key=key,
        request_id=f"r{key}",
        prompt_token_ids=list(prompt),
        params=params,
        max_tokens=max_tokens,
        arrival_time=0.0,
        eos_token_ids=kwargs.pop("eos_token_ids", (EOS,)),
        **kwargs,
    )


class Sim:
    """A scheduler, a device, and everything that the clients were told."""

    def __init__(
        self,
        *,
        num_blocks=65,
        block_size=4,
        num_groups=1,
        prefix_caching=True,
        budget=64,
        max_model_len=None,
        depth=0,
        policy="fcfs",
        veto=lambda view: None,
        check_extra_args=lambda params: None,
        **config,
    ):
        kv = kv_config(num_blocks, block_size, num_groups)
        max_model_len = kv.num_tokens if max_model_len is None else max_model_len
        config.setdefault("max_num_seqs", 8)
        self.config = SchedulerConfig(max_num_batched_tokens=budget, policy=policy, **config)
        self.cache = KVCacheManager(kv, prefix_caching)
        policies = {"fcfs": FirstComePolicy, "priority": PriorityPolicy}
        self.policy = policies[policy]() if isinstance(policy, str) else policy
        intake = Intake(self.config, self.policy, self.cache, max_model_len, veto, check_extra_args)
        self.scheduler = Scheduler(self.config, self.cache, intake, max_model_len, budget)
        self.device = FakeDevice(num_groups, num_blocks, block_size, self.config.max_num_seqs)
        self.budget, self.depth = budget, depth
        self.in_flight = deque()
        self.requests, self.tokens, self.started, self.finished = {}, {}, {}, {}
        self.logprobs, self.prompt_logprobs, self.aborted = {}, {}, set()
        self.totals = Counter()
        self.plans = []
        self.num_idle_calls = 0

    # -- driving -------------------------------------------------------------------------------

    def add(self, request):
        for index in range(request.params.n):
            self.device.requests[request.key + index] = request
        self.scheduler.add(request)
        for index in range(request.params.n):
            self.requests[request.key + index] = (request, index)
            self.tokens[request.key + index] = []

    def abort(self, key):
        if key in self.requests and key not in self.finished:
            self.collect()
            if key not in self.finished:
                self.aborted.add(key)
        self.scheduler.abort(key)

    def step(self, fails=lambda key: False):
        """One round of the engine's loop; returns the plan."""
        plan = self.scheduler.schedule()
        if plan is not None:
            self.check_plan(plan)
            self.plans.append(plan)
            self.in_flight.append((plan, self.device.execute(plan, fails)))
        elif not self.in_flight:
            assert not self.scheduler.num_live, "live sequences, but nothing can advance"
        self.check_accounting()
        if self.in_flight and (plan is None or len(self.in_flight) > self.depth):
            self.scheduler.update(*self.in_flight.popleft())
            self.check_accounting()
        self.collect()
        return plan

    def run(self, max_steps=2000):
        steps = 0
        while self.scheduler.has_work or self.in_flight:
            self.step()
            steps += 1
            assert steps <= max_steps, "no end in sight"
        self.check_idle()
        return self

    def collect(self):
        out = self.scheduler.take_outputs()
        for key, token_id in zip(out.keys, out.token_ids, strict=True):
            assert key in self.started or key in out.started
            assert key not in self.finished
            self.tokens[key].append(token_id)
        for key, started in out.started.items():
            assert key not in self.started
            self.started[key] = started
        for key, entries in out.logprobs.items():
            self.logprobs.setdefault(key, []).extend(entries)
        for key, entries in out.prompt_logprobs.items():
            self.prompt_logprobs.setdefault(key, []).extend(entries)
        for key, finish in out.finished.items():
            assert key not in self.finished, "ended twice"
            self.finished[key] = finish
        for name in (
            "num_preemptions",
            "prefix_queries",
            "prefix_hits",
            "num_steps",
            "num_batched_tokens",
        ):
            self.totals[name] += getattr(out.stats, name)
        assert out.stats.num_running == len(self.scheduler._running)
        assert out.stats.num_waiting == len(self.scheduler._waiting)
        assert out.stats.num_running + out.stats.num_waiting == self.scheduler.num_live

    # -- checking ------------------------------------------------------------------------------

    def check_plan(self, plan):
        assert plan.num_tokens <= self.budget
        assert len(set(plan.rows.tolist())) == len(plan.rows) <= self.config.max_num_seqs
        assert (plan.num_scheduled_tokens > 0).all()
        assert {new.row for new in plan.new_rows} <= set(plan.rows.tolist())
        for array in (plan.rows, plan.num_scheduled_tokens, plan.num_computed_tokens):
            assert array.dtype == np.int32
        assert plan.keys.dtype == np.int64
        assert plan.samples.dtype == np.bool_

    def check_accounting(self):
        scheduler, cache = self.scheduler, self.cache
        live = list(scheduler._sequences.values())
        for group, pool in enumerate(cache._pools):
            holders = Counter(b for sequence in live for b in sequence.blocks.blocks[group])
            ids = range(pool.num_blocks)
            assert cache.ref_counts(group, ids) == [holders[block] for block in ids]
            assert pool.num_used == len(holders)
            assert pool.num_free == pool.num_blocks - 1 - len(holders)
        for sequence in scheduler._waiting:
            assert sequence.blocks.num_blocks == 0
        assert scheduler._waiting.num_tokens == sum(len(s.token_ids) for s in scheduler._waiting)
        orders = [sequence.order for sequence in scheduler._waiting]
        assert orders == sorted(orders)
        assert scheduler._table.num_free + len(scheduler._running) == self.config.max_num_seqs
        assert (scheduler._table.num_pending >= 0).all()

    def check_idle(self):
        scheduler = self.scheduler
        assert scheduler.num_live == 0
        assert not scheduler.has_work
        assert len(scheduler._running) == len(scheduler._waiting) == 0
        assert scheduler._waiting.num_tokens == 0
        assert not scheduler._freed_rows
        assert scheduler._table.num_free == self.config.max_num_seqs
        assert (scheduler._table.keys == -1).all()
        assert self.cache.num_used == 0
        assert self.cache.usage == 0
        assert scheduler.schedule() is None
        assert self.device.rows == [None] * self.config.max_num_seqs
        assert set(self.finished) == set(self.requests) >= set(self.started)

    def check_answers(self, may_fail=False):
        """Each sequence got the tokens it gets alone, and the right end."""
        for key, (request, index) in self.requests.items():
            answer, reason, stop = reference(request, index)
            finish, got = self.finished[key], self.tokens[key]
            if finish.reason is FinishReason.ABORT:
                assert key in self.aborted
                assert got == answer[: len(got)]
                continue
            if finish.reason is FinishReason.ERROR:
                assert may_fail
                assert self.device.failed_keys[key]
                assert finish.kind == "failed"
                assert finish.message == FAILURE
                assert got == answer[: len(got)]
                continue
            assert not self.device.failed_keys[key] or self.depth > 0
            assert key in self.started
            assert got == answer, f"key {key}"
            assert (finish.reason, finish.stop_token_id) == (reason, stop)
            self.check_logprobs(key, request, index)

    def check_logprobs(self, key, request, index):
        num_prompt = len(request.prompt_token_ids)
        if request.params.logprobs is None:
            assert key not in self.logprobs
        else:
            entries = self.logprobs.get(key, [])
            assert [entry.token_ids[0] for entry in entries] == self.tokens[key]
            places = [num_prompt + place for place in range(len(self.tokens[key]))]
            assert [entry.ranks[0] for entry in entries] == places
        if request.params.prompt_logprobs is None or index > 0:
            assert key not in self.prompt_logprobs
        else:
            entries = self.prompt_logprobs.get(key, [])
            assert [entry.ranks[0] for entry in entries] == list(range(1, num_prompt))
            assert [entry.token_ids[0] for entry in entries] == request.prompt_token_ids[1:]

    def check_stats(self):
        assert self.totals["prefix_hits"] == sum(s.num_cached_tokens for s in self.started.values())
        assert self.totals["num_steps"] == len(self.plans)
        assert self.totals["num_batched_tokens"] == sum(plan.num_tokens for plan in self.plans)
        entries = Counter(new.key for plan in self.plans for new in plan.new_rows)
        asked = sum(
            len(self.requests[key][0].prompt_token_ids) for key in entries if key in self.started
        )
        assert self.totals["prefix_queries"] == asked
        # Every entry into a row but the first follows a preemption.
        again = sum(count - 1 for count in entries.values())
        assert again <= self.totals["num_preemptions"]
        if not self.aborted and not self.device.failed_keys:
            assert again == self.totals["num_preemptions"]
