"""What an API edge needs of an engine; ``AsyncEngine`` is it, tests have their own."""

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from cardan.core.engine.messages import SleepMode
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
            EngineAsleepError: the engine sleeps, or is about to (503).
            RequestFailedError: this request could not be computed (500).
            EngineDeadError: the engine died or is shutting down (503).
        """

    async def abort(self, request_id: str) -> None:
        """End a request; unknown ids are ignored."""

    async def sleep(self, level: int = 1, mode: SleepMode = "wait") -> None:
        """Give the device's memory back; returns when the engine sleeps.

        Level 1 keeps the weights on the host, level 2 drops them, to be loaded again. Running
        requests are waited for, or aborted; new ones are refused from now on. Cached prefixes are
        forgotten. Asking again for the same level does no harm.

        Raises:
            UnsupportedError: the device cannot sleep (501).
            InputError: there is no such level, or the engine sleeps at another one (400).
            RequestFailedError: the host cannot keep the weights; all is as before (500).
            EngineDeadError: as for ``generate``.
        """

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory of ``weights``, of ``kv_cache``, or of both (None) again.

        Requests are taken once both are awake. A sleep that has not begun yet is given up.

        Raises:
            InputError: there is no such tag (400).
            RequestFailedError: it does not fit, or the weights are gone; try again (500).
            EngineDeadError: as for ``generate``.
        """

    @property
    def sleep_level(self) -> int:
        """What the engine sleeps at; 0: it is awake."""

    def health(self) -> EngineHealth: ...

    def stats(self) -> EngineStats:
        """The newest gauges; counters are totals since the start."""
