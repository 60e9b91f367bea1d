"""Keeps a server busy: requests at their due times, or as fast as N clients go.

An open load sends each request when it is due, whatever became of the others. If a request must
wait for its turn (`max_concurrency`), its due time stays, so a slow server cannot hide its slowness
by slowing the load down (coordinated omission). In a closed load each of N clients sends its next
request when the one before has ended; due is then when it is sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from cardan.bench.record import RequestRecord

_LAG_INTERVAL = 0.01
INTERRUPTED = "interrupted: the run was stopped before this request was answered"


class Sender(Protocol):
    """Sends one request and fills its record; see ``Client.send``."""

    def __call__(self, body: bytes, record: RequestRecord, start: float) -> Awaitable[None]: ...


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request ready to be sent: encoded before the run, so that encoding delays nothing."""

    body: bytes
    prompt_len: int | None = None


@dataclass(slots=True)
class LoadOutcome:
    """What a run left.

    Attributes:
        records: of all requests that were sent, by index.
        lags: how late the event loop woke from each of its short sleeps, seconds. Up to 0.001 of
            it is the timer's own step; more means that times seen by this process are late.
        num_unsent: requests that were due but still waited for their turn when the run was stopped.
        is_interrupted: the run was cancelled; running requests have an error that says so.
    """

    records: list[RequestRecord] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)
    num_unsent: int = 0
    is_interrupted: bool = False


class Load:
    """One run of a list of requests. Use it once, from one event loop."""

    def __init__(
        self,
        requests: Sequence[PreparedRequest],
        send: Sender,
        *,
        max_concurrency: int | None = None,
        duration: float | None = None,
        on_end: Callable[[RequestRecord], None] | None = None,
    ) -> None:
        """Prepare a run.

        Args:
            max_concurrency: most requests on their way at once; clients of a closed load.
            duration: seconds after which no request is begun; those running are waited for.
            on_end: called with the record of each request that has ended.
        """
        self._requests = requests
        self._send = send
        self._max_concurrency = max_concurrency
        self._duration = float("inf") if duration is None else duration
        self._on_end = on_end
        self._outcome = LoadOutcome()
        self._num_begun = 0
        self._start = 0.0  # of the run, on the event loop's clock

    async def run_open(self, due_times: Iterable[float]) -> LoadOutcome:
        """Send each request at its due time (seconds, ascending).

        Returns when the last has been answered, or at once if cancelled.
        """
        return await self._run(lambda group: self._send_when_due(due_times, group))

    async def run_closed(self) -> LoadOutcome:
        """Let ``max_concurrency`` clients (1 if not given) send one request after another."""
        return await self._run(self._start_clients)

    async def _run(self, begin: Callable[[asyncio.TaskGroup], Awaitable[None]]) -> LoadOutcome:
        outcome = self._outcome
        self._start = asyncio.get_running_loop().time()
        lag_watch = asyncio.create_task(self._watch_lag())
        try:
            async with asyncio.TaskGroup() as group:
                await begin(group)
        except asyncio.CancelledError:
            outcome.is_interrupted = True
            task = asyncio.current_task()
            if task is not None:
                task.uncancel()
        finally:
            lag_watch.cancel()
        outcome.records.sort(key=lambda record: record.index)
        outcome.num_unsent = self._num_begun - len(outcome.records)
        return outcome

    async def _send_when_due(self, due_times: Iterable[float], group: asyncio.TaskGroup) -> None:
        limit = self._max_concurrency
        turn = nullcontext() if limit is None else asyncio.Semaphore(limit)
        for index, due in zip(range(len(self._requests)), due_times, strict=False):
            if due >= self._duration:
                break
            delay = due - self._now()
            if delay > 0:
                await asyncio.sleep(delay)
            self._num_begun += 1
            group.create_task(self._send_in_turn(index, due, turn))

    async def _send_in_turn(
        self, index: int, due: float, turn: asyncio.Semaphore | nullcontext[None]
    ) -> None:
        async with turn:
            await self._send_one(index, due)

    async def _start_clients(self, group: asyncio.TaskGroup) -> None:
        indices = iter(range(len(self._requests)))
        for _ in range(self._max_concurrency or 1):
            group.create_task(self._run_client(indices))

    async def _run_client(self, indices: Iterator[int]) -> None:
        for index in indices:
            if self._now() >= self._duration:
                return
            self._num_begun += 1
            await self._send_one(index, None)

    async def _send_one(self, index: int, due: float | None) -> None:
        """Send one request; without a due time of its own it is due when it is sent."""
        request, now = self._requests[index], self._now()
        record = RequestRecord(
            index, now if due is None else due, now, prompt_tokens=request.prompt_len or 0
        )
        self._outcome.records.append(record)
        try:
            await self._send(request.body, record, self._start)
        except asyncio.CancelledError:
            record.error = INTERRUPTED
            raise
        finally:
            if due is None:
                record.due = record.sent
        if self._on_end is not None:
            self._on_end(record)

    async def _watch_lag(self) -> None:
        while True:
            intended = self._now() + _LAG_INTERVAL
            await asyncio.sleep(_LAG_INTERVAL)
            self._outcome.lags.append(self._now() - intended)

    def _now(self) -> float:
        return asyncio.get_running_loop().time() - self._start


def peak_concurrency(records: Iterable[RequestRecord]) -> int:
    """Most requests that were on their way at the same time."""
    edges = [edge for record in records for edge in ((record.sent, 1), (record.end, -1))]
    running = peak = 0
    for _, step in sorted(edges):  # at the same time an end (-1) comes before a begin
        running += step
        peak = max(peak, running)
    return peak
