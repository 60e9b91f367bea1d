"""What the engine does right now, measured twice a second for all who watch."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace

from pydantic import BaseModel, Field

from cardan.core.types.engine_info import EngineState
from cardan.server.context import VERSION, ServerContext
from cardan.server.sampling import MODEL_DEFAULTS

SAMPLE_SECONDS = 0.5
# Rates are means over this many intervals: a slow engine's steps come less often than samples.
_NUM_INTERVALS = 4


class LiveInfo(BaseModel):
    """What stays the same while the engine lives."""

    version: str
    models: list[str]
    architecture: str
    platform: str
    device: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    kv_cache_bytes: int
    weight_bytes: int
    startup_seconds: dict[str, float]
    warnings: list[str]
    sampling_defaults: dict[str, float] = Field(description="what the model's authors recommend")


class LiveSample(BaseModel):
    """State now, and rates over the last two seconds."""

    time: float = Field(description="seconds since the epoch")
    state: EngineState
    reason: str = Field(description="why the state is not ready")
    num_running: int
    num_waiting: int
    kv_usage: float = Field(description="share of the KV blocks in use, 0 to 1")
    prefix_hit_rate: float | None = Field(
        description="share of prompt tokens found in the cache since the start; null: none yet"
    )
    num_preemptions: int = Field(description="since the start")
    prompt_tokens_per_second: float = Field(description="computed, not cached")
    output_tokens_per_second: float
    steps_per_second: float
    tokens_per_step: float
    num_ended: int = Field(description="requests since the start")


@dataclass(frozen=True, slots=True)
class _Totals:
    """Counters at a monotonic time."""

    at: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    steps: int = 0
    batched_tokens: int = 0

    def since(self, before: "_Totals") -> "_Totals":
        """Differences; a counter that fell (its engine was replaced) counts from zero."""
        changes = {
            name: max(0, getattr(self, name) - getattr(before, name))
            for name in ("prompt_tokens", "output_tokens", "steps", "batched_tokens")
        }
        return replace(self, at=self.at - before.at, **changes)


class LiveSampler:
    """Measures while somebody watches; all watchers get the same samples."""

    def __init__(self, context: ServerContext, interval: float = SAMPLE_SECONDS) -> None:
        """``interval``: seconds between samples."""
        self._context = context
        self._interval = interval
        self._num_watchers = 0
        self._task: asyncio.Task[None] | None = None
        self._history = deque([self._totals()], maxlen=_NUM_INTERVALS)
        self._latest = self._measure(self._history[0])
        self._next: asyncio.Future[LiveSample] | None = None

    @property
    def is_running(self) -> bool:
        return self._task is not None

    async def watch(self) -> AsyncGenerator[LiveSample, None]:
        """Samples, the first at once, until the server stops; one who is slow misses some."""
        self._enter()
        try:
            yield self._latest
            while self._latest.state != "draining" and self._next is not None:
                yield await asyncio.shield(self._next)
        finally:
            self._leave()

    def _enter(self) -> None:
        self._num_watchers += 1
        if self._task is None:
            self._history.clear()
            self._history.append(self._totals())
            self._latest = self._measure(self._history[0])
            loop = asyncio.get_running_loop()
            self._next = loop.create_future()
            self._task = loop.create_task(self._run())

    def _leave(self) -> None:
        self._num_watchers -= 1
        if self._num_watchers == 0 and self._task is not None:
            self._task.cancel()
            self._task = self._next = None

    async def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = await self._context.tracker.wait_draining(self._interval)
            now = self._totals()
            self._latest = self._measure(now)
            self._history.append(now)
            if self._next is not None:
                self._next.set_result(self._latest)
                self._next = asyncio.get_running_loop().create_future()

    def _totals(self) -> _Totals:
        stats, traces = self._context.engine.stats(), self._context.engine.traces
        return _Totals(
            time.monotonic(),
            traces.num_prompt_tokens,
            traces.num_output_tokens,
            stats.num_steps,
            stats.num_batched_tokens,
        )

    def _measure(self, now: _Totals) -> LiveSample:
        engine = self._context.engine
        stats, health = engine.stats(), engine.health()
        change = now.since(self._history[0])
        seconds = max(change.at, self._interval / 2)
        queries = stats.prefix_queries
        return LiveSample(
            time=time.time(),
            state="draining" if self._context.tracker.is_draining else health.state,
            reason=health.reason,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            kv_usage=stats.kv_usage,
            prefix_hit_rate=stats.prefix_hits / queries if queries else None,
            num_preemptions=stats.num_preemptions,
            prompt_tokens_per_second=change.prompt_tokens / seconds,
            output_tokens_per_second=change.output_tokens / seconds,
            steps_per_second=change.steps / seconds,
            tokens_per_step=change.batched_tokens / change.steps if change.steps else 0.0,
            num_ended=engine.traces.num_ended,
        )


def live_info(context: ServerContext) -> LiveInfo:
    """Facts of the engine at hand."""
    info = context.engine.info
    return LiveInfo(
        version=VERSION,
        models=list(context.model_names),
        architecture=info.architecture,
        platform=info.platform,
        device=info.device,
        dtype=info.dtype,
        max_model_len=info.max_model_len,
        max_num_seqs=info.max_num_seqs,
        max_num_batched_tokens=info.max_num_batched_tokens,
        block_size=info.block_size,
        num_blocks=info.num_blocks,
        kv_cache_bytes=info.kv_cache_bytes,
        weight_bytes=info.weight_bytes,
        startup_seconds=info.startup_seconds,
        warnings=list(info.warnings),
        sampling_defaults={
            name: info.generation_config[name]
            for name in MODEL_DEFAULTS
            if info.generation_config.get(name) is not None
        },
    )
