"""Traces of requests as the page and other clients get them: numbers, and the end in words."""

from typing import Any, Literal

from pydantic import BaseModel, Field

from cardan.core.engine.trace_book import RequestTrace, SequenceTrace

State = Literal["waiting", "running", "preempted", "finished"]
_SECONDS = "seconds from arrival"


class TraceSummary(BaseModel):
    """One request in the list."""

    id: str
    state: State
    arrived_at: float = Field(description="seconds since the epoch")
    num_samples: int
    num_prompt_tokens: int
    num_cached_tokens: int | None = Field(
        description="prompt tokens found in the cache; null before the first step"
    )
    num_output_tokens: int
    num_preemptions: int
    queue_seconds: float | None = Field(description="until the first step")
    first_token_seconds: float | None = Field(description=_SECONDS)
    seconds: float = Field(description="until the end, or so far")
    finish_reason: str | None = Field(description="of the first sample that has one")


class TraceList(BaseModel):
    """What is going on and what went on lately."""

    num_live: int = Field(description="listed or not")
    live: list[TraceSummary] = Field(description="not ended, oldest first")
    recent: list[TraceSummary] = Field(description="ended, latest first")


class Chunk(BaseModel):
    """Prompt tokens that one step computed (after a preemption, of all that was known)."""

    at: float = Field(description=f"end of the step, {_SECONDS}")
    num_tokens: int


class SampleTrace(BaseModel):
    """One of the ``n`` answers."""

    index: int
    chunks: list[Chunk]
    preempted_at: list[float] = Field(description=_SECONDS)
    num_tokens: int
    token_stride: int = Field(description="token_times has every so many-th token")
    token_times: list[float] = Field(description=_SECONDS)
    last_token_at: float | None = Field(description=_SECONDS)
    finish_reason: str | None
    stop_token_id: int | None
    why: str = Field(description="the state or the end in words")


class Trace(TraceSummary):
    """Everything that is known of one request. Its text is not."""

    max_tokens: int
    priority: int
    error: str | None
    samples: list[SampleTrace]


def summarize(trace: RequestTrace, now: float) -> TraceSummary:
    """``now`` is monotonic seconds."""
    return TraceSummary(**_summary(trace, now))


def describe(trace: RequestTrace, now: float, max_model_len: int) -> Trace:
    """The whole of a trace."""
    return Trace(
        **_summary(trace, now),
        max_tokens=trace.max_tokens,
        priority=trace.priority,
        error=trace.error,
        samples=[
            _sample(index, sequence, _why(trace, sequence, max_model_len))
            for index, sequence in enumerate(trace.sequences)
        ],
    )


def _summary(trace: RequestTrace, now: float) -> dict[str, Any]:
    age = now - trace.arrival_time
    firsts = [item.tokens.times[0] for item in trace.sequences if item.tokens.times]
    reasons = [item.finish_reason for item in trace.sequences if item.finish_reason]
    return {
        "id": trace.request_id,
        "state": _state(trace),
        "arrived_at": trace.arrived_at,
        "num_samples": len(trace.sequences),
        "num_prompt_tokens": trace.num_prompt_tokens,
        "num_cached_tokens": trace.num_cached_tokens,
        "num_output_tokens": trace.num_output_tokens,
        "num_preemptions": trace.num_preemptions,
        "queue_seconds": trace.queue_seconds,
        "first_token_seconds": min(firsts, default=None),
        "seconds": max(0.0, age) if trace.end_seconds is None else trace.end_seconds,
        "finish_reason": _finish_reason(trace, reasons),
    }


def _finish_reason(trace: RequestTrace, reasons: list[str]) -> str | None:
    if trace.error is not None:
        return "error"
    if trace.end_seconds is None or reasons:
        return reasons[0] if reasons else None
    return "abort"


def _state(trace: RequestTrace) -> State:
    if trace.end_seconds is not None:
        return "finished"
    if trace.queue_seconds is None:
        return "waiting"
    if all(item.is_preempted or item.finish_reason for item in trace.sequences):
        return "preempted"
    return "running"


def _sample(index: int, sequence: SequenceTrace, why: str) -> SampleTrace:
    chunks = zip(sequence.chunk_times, sequence.chunk_tokens, strict=True)
    return SampleTrace(
        index=index,
        chunks=[Chunk(at=_round(at), num_tokens=count) for at, count in chunks],
        preempted_at=list(map(_round, sequence.preemption_times)),
        num_tokens=sequence.tokens.count,
        token_stride=sequence.tokens.stride,
        token_times=list(map(_round, sequence.tokens.times)),
        last_token_at=sequence.tokens.last,
        finish_reason=sequence.finish_reason,
        stop_token_id=sequence.stop_token_id,
        why=why,
    )


def _round(seconds: float) -> float:
    """What 32 bits hold, without the digits that they make up."""
    return round(seconds, 6)


def _why(trace: RequestTrace, sequence: SequenceTrace, max_model_len: int) -> str:
    if trace.error is not None and sequence.finish_reason is None:
        return f"It failed: {trace.error}"
    match sequence.finish_reason, sequence.stop_kind:
        case "stop", "eos":
            return "The model ended its answer."
        case "stop", "token":
            return f"Token {sequence.stop_token_id}, one of the request's stop tokens, came."
        case "stop", _:
            return "One of the request's stop texts came."
        case "length", _ if trace.num_prompt_tokens + trace.max_tokens >= max_model_len:
            return f"The context of {max_model_len} tokens was full."
        case "length", _:
            return f"The limit of {trace.max_tokens} tokens was reached."
        case None, _ if trace.end_seconds is None:
            return _now(trace, sequence)
    return "It was ended early: the client left or stopped it, or the server was stopping."


def _now(trace: RequestTrace, sequence: SequenceTrace) -> str:
    if trace.queue_seconds is None:
        return "It waits for its first step."
    if sequence.is_preempted:
        return "It was preempted to free cache blocks and waits to be computed again."
    if not sequence.tokens.count:
        return "Its prompt is being computed."
    return "It is answering."
