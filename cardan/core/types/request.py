"""A request as the engine receives it: token ids and settings, no text."""

from dataclasses import dataclass, field
from enum import StrEnum

from cardan.core.types.sampling_params import SamplingParams


class FinishReason(StrEnum):
    """Why a sequence ended; ``stop`` and ``length`` as in the OpenAI API."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """Prompt positions ``[offset, offset + length)`` that stand for one media item ``key``."""

    offset: int
    length: int
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One request on its way into an engine.

    ``key`` is chosen by the client: sequence ``i`` of ``params.n`` is known as ``key + i`` in all
    messages, so keys of live requests must not overlap. ``arrival_time`` is ``time.monotonic()``
    of the machine, seconds. ``cache_salt``, ``adapter`` and ``media`` separate prefix-cache
    domains. ``max_tokens`` is resolved: at least 0 and never past the context.
    """

    key: int
    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    arrival_time: float
    eos_token_ids: tuple[int, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    priority: int = 0
    cache_salt: str | None = None
    adapter: str | None = None
    media: tuple[MediaSpan, ...] = field(default=())

    @property
    def num_sequences(self) -> int:
        return self.params.n
