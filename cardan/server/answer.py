"""From engine outputs to an answer: event by event, or folded from those very events.

An unstreamed answer is made of the same chunks that a stream would have sent, so both say the
same by construction.
"""

from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from cardan.core.types.outputs import RequestOutput
from cardan.server.protocol.fields import StreamOptions
from cardan.server.sse import event
from cardan.server.usage import UsageCounter

# The outputs of a request's prompts as they come, each with the index of its prompt.
Outputs = AsyncGenerator[tuple[int, RequestOutput], None]
Chunk = dict[str, Any]


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What all events of an answer repeat; ``created`` is seconds since the epoch."""

    id: str
    created: int
    model: str
    system_fingerprint: str

    def to_dict(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }


class AnswerWriter(Protocol):
    """One API dialect's form of an answer."""

    chunk_object: str
    answer_object: str

    def chunks(self, prompt_index: int, output: RequestOutput) -> list[Chunk]:
        """What one engine output adds: chunks without head and usage, of one choice each."""

    def fold(self, chunks: Iterable[Chunk]) -> dict[str, Any]:
        """The whole answer, without head and usage, that all chunks of a stream add up to."""


async def stream_answer(
    outputs: Outputs,
    writer: AnswerWriter,
    head: AnswerHead,
    options: StreamOptions,
    usage: UsageCounter,
) -> AsyncGenerator[bytes, None]:
    """Server-sent events of an answer; those that one engine output makes come together.

    Owns ``outputs``. ``usage`` is kept by whoever makes them.
    """
    base = head.to_dict(writer.chunk_object)
    async with aclosing(outputs):
        async for prompt_index, output in outputs:
            extra = _running_usage(options, usage)
            events = [
                event({**base, **chunk, **extra}) for chunk in writer.chunks(prompt_index, output)
            ]
            if events:
                yield b"".join(events)
    if options.include_usage:
        yield event({**base, "choices": [], "usage": usage.to_dict()})


async def whole_answer(
    outputs: Outputs, writer: AnswerWriter, head: AnswerHead, usage: UsageCounter
) -> dict[str, Any]:
    """The answer as one object. Owns ``outputs``."""
    chunks: list[Chunk] = []
    async with aclosing(outputs):
        async for prompt_index, output in outputs:
            chunks += writer.chunks(prompt_index, output)
    return {
        **head.to_dict(writer.answer_object),
        **writer.fold(chunks),
        "usage": usage.to_dict(),
    }


def _running_usage(options: StreamOptions, usage: UsageCounter) -> dict[str, Any]:
    if options.continuous_usage_stats:
        return {"usage": usage.to_dict()}
    return {"usage": None} if options.include_usage else {}
