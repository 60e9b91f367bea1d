"""What happened to each request and when: live ones and the latest that ended. Never their text."""

import time
from array import array
from collections.abc import Iterable, Sequence
from typing import Literal

from cardan.core.text.postprocess import RequestState, SequenceOutput
from cardan.core.types.outputs import StepOutputs
from cardan.core.types.request import EngineRequest

# Points kept of a request, shared by its sequences, and the least that each of them has.
MAX_POINTS = 2048
MIN_POINTS = 16
_MAX_CHUNKS = 512
_MAX_PREEMPTIONS = 64

StopKind = Literal["eos", "token", "text"]


class TokenTimes:
    """Times of a sequence's tokens, thinned to every ``stride``-th once there are too many.

    ``times[i]`` is when token ``i * stride`` came, in seconds from the request's arrival.
    """

    __slots__ = ("_limit", "count", "last", "stride", "times")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.count = 0
        self.stride = 1
        self.times = array("f")
        self.last: float | None = None

    def add(self, seconds: float) -> None:
        if self.count % self.stride == 0:
            if len(self.times) == self._limit:
                self.times = self.times[::2]
                self.stride *= 2
            if self.count % self.stride == 0:
                self.times.append(seconds)
        self.count += 1
        self.last = seconds


class SequenceTrace:
    """One sample of a request. Times are seconds from the request's arrival.

    A chunk is what one step computed of the prompt (or, after a preemption, of everything known);
    when there are too many, two neighbours become one. ``stop_token_id`` is set with stop kind
    ``token``; the text of a stop string is not kept.
    """

    __slots__ = (
        "chunk_times",
        "chunk_tokens",
        "finish_reason",
        "is_preempted",
        "num_preemptions",
        "preemption_times",
        "stop_kind",
        "stop_token_id",
        "tokens",
    )

    def __init__(self, limit: int) -> None:
        self.tokens = TokenTimes(limit)
        self.chunk_times = array("f")
        self.chunk_tokens = array("l")
        self.preemption_times = array("f")
        self.num_preemptions = 0
        self.is_preempted = False
        self.finish_reason: str | None = None
        self.stop_kind: StopKind | None = None
        self.stop_token_id: int | None = None

    def add_chunk(self, seconds: float, num_tokens: int) -> None:
        self.is_preempted = False
        if len(self.chunk_times) == _MAX_CHUNKS:
            tokens = self.chunk_tokens
            self.chunk_times = self.chunk_times[1::2]
            self.chunk_tokens = array("l", map(sum, zip(tokens[::2], tokens[1::2], strict=True)))
        self.chunk_times.append(seconds)
        self.chunk_tokens.append(num_tokens)

    def add_preemption(self, seconds: float) -> None:
        self.is_preempted = True
        self.num_preemptions += 1
        if len(self.preemption_times) < _MAX_PREEMPTIONS:
            self.preemption_times.append(seconds)

    def end(self, sequence: SequenceOutput) -> None:
        """Take over what the front knows best: where the answer ends and why."""
        self.tokens.count = len(sequence.token_ids)
        self.finish_reason = sequence.finish_reason
        reason = sequence.stop_reason
        if isinstance(reason, int):
            self.stop_kind, self.stop_token_id = "token", reason
        elif self.finish_reason == "stop":
            self.stop_kind = "eos" if reason is None else "text"


class RequestTrace:
    """One request. ``arrival_time`` is monotonic seconds, the other times count from it;
    ``arrived_at`` is the same in seconds since the epoch.
    """

    __slots__ = (
        "arrival_time",
        "arrived_at",
        "end_seconds",
        "error",
        "max_tokens",
        "num_cached_tokens",
        "num_prompt_tokens",
        "priority",
        "queue_seconds",
        "request_id",
        "sequences",
    )

    def __init__(self, request: EngineRequest) -> None:
        self.request_id = request.request_id
        self.arrival_time = request.arrival_time
        self.arrived_at = time.time() - (time.monotonic() - request.arrival_time)
        self.priority = request.priority
        self.max_tokens = request.max_tokens
        self.num_prompt_tokens = len(request.prompt_token_ids)
        limit = max(MIN_POINTS, MAX_POINTS // request.num_sequences)
        self.sequences = [SequenceTrace(limit) for _ in range(request.num_sequences)]
        # Of the prompt, when the first sequence was scheduled; None: that was not yet.
        self.num_cached_tokens: int | None = None
        self.queue_seconds: float | None = None
        self.end_seconds: float | None = None
        self.error: str | None = None

    @property
    def num_output_tokens(self) -> int:
        return sum(sequence.tokens.count for sequence in self.sequences)

    @property
    def num_preemptions(self) -> int:
        return sum(sequence.num_preemptions for sequence in self.sequences)


class TraceBook:
    """Owner of all traces. Used on one thread.

    ``num_prompt_tokens`` (computed, not cached), ``num_output_tokens`` and ``num_ended`` are
    totals since the start.
    """

    def __init__(self, max_recent: int = 256) -> None:
        self.max_recent = max_recent
        self._live: dict[str, RequestTrace] = {}
        # The latest last. An id that comes again replaces the trace that had it.
        self._recent: dict[str, RequestTrace] = {}
        self._sequences: dict[int, tuple[RequestTrace, SequenceTrace]] = {}
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self.num_ended = 0

    @property
    def live(self) -> list[RequestTrace]:
        """Requests that have not ended, oldest first."""
        return list(self._live.values())

    @property
    def recent(self) -> list[RequestTrace]:
        """Requests that ended, latest first."""
        return list(reversed(self._recent.values()))

    def find(self, request_id: str) -> RequestTrace | None:
        return self._live.get(request_id) or self._recent.get(request_id)

    def open(self, request: EngineRequest) -> None:
        """Begin the trace of a request."""
        trace = RequestTrace(request)
        self._recent.pop(request.request_id, None)
        self._live[request.request_id] = trace
        for index, sequence in enumerate(trace.sequences):
            self._sequences[request.key + index] = (trace, sequence)

    def apply(self, outputs: StepOutputs, now: float) -> None:
        """Book a step, which ended at the time in its statistics, else ``now`` (monotonic s)."""
        if outputs.stats is not None and outputs.stats.last_step_time:
            now = outputs.stats.last_step_time
        live = self._sequences
        for key, started in outputs.started.items():
            if (entry := live.get(key)) and entry[0].queue_seconds is None:
                trace = entry[0]
                trace.queue_seconds = max(0.0, started.scheduled_time - trace.arrival_time)
                trace.num_cached_tokens = started.num_cached_tokens
        for key in outputs.preempted:
            if entry := live.get(key):
                entry[1].add_preemption(now - entry[0].arrival_time)
        for key, num_tokens in outputs.chunks.items():
            self.num_prompt_tokens += num_tokens
            if entry := live.get(key):
                entry[1].add_chunk(now - entry[0].arrival_time, num_tokens)
        self.num_output_tokens += len(outputs.keys)
        for key in outputs.keys:
            if entry := live.get(key):
                entry[1].tokens.add(now - entry[0].arrival_time)

    def drop(self, keys: Iterable[int]) -> None:
        """Expect no more of sequences that the front has ended."""
        for key in keys:
            self._sequences.pop(key, None)

    def close(self, state: RequestState, now: float) -> None:
        """End a request's trace with what ``state`` says; unfinished sequences were aborted."""
        request = state.request
        trace = self._live.pop(request.request_id)
        self.drop(range(request.key, request.key + request.num_sequences))
        self._end(trace, state.sequences)
        end = now if state.metrics.finished_time is None else state.metrics.finished_time
        trace.end_seconds = max(0.0, end - trace.arrival_time)
        trace.error = None if state.error is None else str(state.error)
        self._recent[request.request_id] = trace
        if len(self._recent) > self.max_recent:
            del self._recent[next(iter(self._recent))]
        self.num_ended += 1

    @staticmethod
    def _end(trace: RequestTrace, sequences: Sequence[SequenceOutput]) -> None:
        for sequence, output in zip(trace.sequences, sequences, strict=True):
            sequence.end(output)
