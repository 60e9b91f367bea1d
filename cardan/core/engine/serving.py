"""What an API edge needs of an engine; ``AsyncEngine`` is it, tests have their own."""

from collections.abc import AsyncIterator
from typing import Protocol

from cardan.core.engine.trace_book import TraceBook
from cardan.core.text.tokenizer import Tokenizer
from cardan.core.types.engine_info import EngineHealth, EngineInfo
from cardan.core.types.outputs import EngineStats, RequestOutput
from cardan.core.types.prompt import Prompt
from cardan.core.types.sampling_params import SamplingParams


class ServingEngine(Protocol):
    """Generation for many callers on one event loop."""

    tokenizer: Tokenizer
    traces: TraceBook

    @property
    def info(self) -> EngineInfo: ...

    async def encode(self, prompt: Prompt, params: SamplingParams | None = None) -> list[int]:
        """Token ids of a prompt: templated, tokenized (off the loop when long), truncated as
        ``params.truncate_prompt_tokens`` asks.

        Raises:
            InputError: no chat template, a template error, an id out of range, an empty prompt.
        """

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Outputs of one request as they come, in the form of ``params.output_kind``.

        With DELTA each output's ``outputs`` hold only sequences with news. Closing the iterator
        (or cancelling its task) aborts the request. Validation happens before the first output.

        Raises:
            InputError: the prompt or a parameter is unusable (400).
            QueueFullError: a queue cap is reached (503).
            RequestFailedError: this request could not be computed (500).
            EngineDeadError: the engine died or is shutting down (503).
        """

    async def abort(self, request_id: str) -> None:
        """End a request; unknown ids are ignored."""

    def health(self) -> EngineHealth: ...

    def stats(self) -> EngineStats:
        """The newest gauges; counters are totals since the start."""
