"""A driver that runs a scheduler on a simulated device and checks every step."""

from collections import Counter, deque

import numpy as np
from scheduler_device import EOS, FAILURE, FakeDevice, reference

from cardan.core.config.engine import EngineConfig
from cardan.core.config.fallbacks import with_fallbacks
from cardan.core.config.model import ModelConfig
from cardan.core.config.scheduler import SchedulerConfig
from cardan.core.kvcache.manager import KVCacheManager
from cardan.core.scheduler.intake import Intake
from cardan.core.scheduler.scheduler import Scheduler
from cardan.core.types.kv import KVCacheConfig, KVCacheGroup, KVCacheSpec
from cardan.core.types.request import EngineRequest, FinishReason
from cardan.core.types.sampling_params import SamplingParams
from cardan.plugins.policies import FirstComePolicy, PriorityPolicy


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
        check_params=lambda params: None,
        **config,
    ):
        kv = kv_config(num_blocks, block_size, num_groups)
        max_model_len = kv.num_tokens if max_model_len is None else max_model_len
        config.setdefault("max_num_seqs", 8)
        section = SchedulerConfig(max_num_batched_tokens=budget, policy=policy, **config)
        whole = EngineConfig(model=ModelConfig(model="none"), scheduler=section)
        self.config = with_fallbacks(whole).scheduler
        self.cache = KVCacheManager(kv, prefix_caching)
        policies = {"fcfs": FirstComePolicy, "priority": PriorityPolicy}
        self.policy = policies[policy]() if isinstance(policy, str) else policy
        intake = Intake(self.config, self.policy, self.cache, max_model_len, veto, check_params)
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

    def step(self, fails=lambda key: False, spoils=lambda key: False):
        """One round of the engine's loop; returns the plan."""
        plan = self.scheduler.schedule()
        if plan is not None:
            self.check_plan(plan)
            self.plans.append(plan)
            self.in_flight.append((plan, self.device.execute(plan, fails, spoils)))
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
        running = {sequence.key for sequence in scheduler._running}
        assert set(cache._announced.values()) <= running
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
        assert self.cache.num_announced == 0
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
                assert finish.message == FAILURE or "NaN" in finish.message
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
