"""What was seen of one request of a benchmark: times, tokens and the error, if any."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class RequestRecord:
    """One request as its client saw it. All times are seconds since the start of the run.

    `due` is when the request should have been sent by the load's plan and `sent` when it was.
    Latencies count from `due`, so that a request which had to wait for its turn pays for the
    wait; the figures from `sent` are kept beside them.

    Attributes:
        index: Place of the request in the load, from 0.
        due: Intended time of sending.
        sent: Actual time of sending; `sent - due` is the wait inside the load generator.
        first_token: When the first chunk that carried tokens came; None when none came.
        token_times: When each chunk that carried tokens came, ascending.
        chunk_tokens: How many tokens each of those chunks carried, in the same order.
        end: When the answer was complete, or failed.
        prompt_tokens: Length of the prompt as the engine counted it.
        output_tokens: Tokens of the answer as the engine counted them.
        error: One line on what went wrong; None for a complete answer.
        status: HTTP status; None where there was none (offline, or no answer at all).
        text: The answer, kept only if asked for.
    """

    index: int
    due: float
    sent: float
    first_token: float | None = None
    token_times: list[float] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)
    end: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None
    status: int | None = None
    text: str = ""
