"""An engine for many callers on one event loop."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence

from cardan.core.engine.client import EngineClient
from cardan.core.engine.frontend import Frontend
from cardan.core.engine.messages import SleepMode
from cardan.core.engine.trace_book import TraceBook
from cardan.core.text.postprocess import RequestState
from cardan.core.text.preprocess import Preprocessor
from cardan.core.text.tokenizer import Tokenizer
from cardan.core.types.engine_info import EngineHealth, EngineInfo
from cardan.core.types.errors import EngineDeadError, InputError
from cardan.core.types.outputs import EngineStats, RequestOutput, StepOutputs
from cardan.core.types.prompt import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from cardan.core.types.sampling_params import SamplingParams

# Prompts of more characters are tokenized on a thread, so that streams go on meanwhile.
_INLINE_CHARACTERS = 4096

_DEFAULTS_FROM_MODEL = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def default_sampling_params(generation_config: dict[str, float]) -> SamplingParams:
    """Sampling settings that a model's authors recommend, the rest as usual."""
    values = {
        name: generation_config[name]
        for name in _DEFAULTS_FROM_MODEL
        if generation_config.get(name) is not None
    }
    return SamplingParams.from_dict(values)


class AsyncEngine:
    """The front of one engine: text in, text out. Bound to the loop that it was made on."""

    def __init__(
        self, client: EngineClient, tokenizer: Tokenizer, preprocessor: Preprocessor
    ) -> None:
        self.tokenizer = tokenizer
        self.traces = TraceBook()
        self._client = client
        self._preprocessor = preprocessor
        self._frontend = Frontend(tokenizer)
        self._loop = asyncio.get_running_loop()
        self._events: dict[int, asyncio.Event] = {}
        self._request_ids: dict[str, RequestState] = {}
        client.connect(self)

    # -- what an API edge uses -----------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        """Of the engine at hand; one that replaced another has a process id of its own."""
        return self._client.info

    async def encode(self, prompt: Prompt, params: SamplingParams | None = None) -> list[int]:
        """Token ids of a prompt; see ``Preprocessor.encode``."""
        if _num_characters(prompt) <= _INLINE_CHARACTERS:
            return self._preprocessor.encode(prompt, params)
        return await asyncio.to_thread(self._preprocessor.encode, prompt, params)

    def default_sampling_params(self) -> SamplingParams:
        return default_sampling_params(self.info.generation_config)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Outputs of one request; see ``ServingEngine.generate``."""
        token_ids = await self.encode(prompt, params)
        if request_id in self._request_ids:
            raise InputError(f"request_id {request_id} is in use", "request_id")
        request = self._preprocessor.to_request(
            token_ids,
            params,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
        )
        text = prompt.text if isinstance(prompt, TextPrompt) else None
        state = self._frontend.open(request, text)
        event = self._events[request.key] = asyncio.Event()
        self._request_ids[request_id] = state
        self.traces.open(request)
        try:
            self._client.submit(request)
            async for output in self._outputs(state, event):
                yield output
        except EngineDeadError as error:
            state.error = error
            raise
        finally:
            self._close(state)

    async def abort(self, request_id: str) -> None:
        """End a request; its iterator yields what there is with finish reason ``abort``."""
        if state := self._request_ids.get(request_id):
            self._client.abort(self._keys(state))

    def health(self) -> EngineHealth:
        return self._client.health()

    def stats(self) -> EngineStats:
        return self._frontend.stats()

    @property
    def num_live(self) -> int:
        """Sequences that are not finished."""
        return self._frontend.num_live

    async def reset_prefix_cache(self) -> None:
        self._client.reset_prefix_cache()

    async def sleep(self, level: int = 1, mode: SleepMode = "wait") -> None:
        """Give the device's memory back until ``wake_up``; see ``ServingEngine.sleep``."""
        await asyncio.wrap_future(self._client.sleep(level, mode))

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory again; see ``ServingEngine.wake_up``."""
        await asyncio.wrap_future(self._client.wake_up(tags))

    @property
    def sleep_level(self) -> int:
        """What the engine sleeps at; 0: it is awake."""
        return self._client.sleep_level

    async def close(self) -> None:
        """Stop the engine; unfinished requests raise ``EngineDeadError``."""
        await asyncio.to_thread(self._client.close)

    # -- outputs, from the client's thread to the loop -----------------------------------------

    def on_outputs(self, outputs: StepOutputs) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._apply, outputs)

    def on_death(self, reason: str) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._fail_all, reason)

    def _apply(self, outputs: StepOutputs) -> None:
        now = time.monotonic()
        changes = self._frontend.apply(outputs, now)
        self.traces.apply(outputs, now)
        if changes.keys_to_abort:
            self.traces.drop(changes.keys_to_abort)
            self._client.abort(changes.keys_to_abort)
        self._wake(changes.states)

    def _fail_all(self, reason: str) -> None:
        self._wake(self._frontend.fail_all(EngineDeadError(reason)))

    def _wake(self, states: list[RequestState]) -> None:
        for state in states:
            if (event := self._events.get(state.request.key)) and state.is_ready:
                event.set()

    async def _outputs(
        self, state: RequestState, event: asyncio.Event
    ) -> AsyncIterator[RequestOutput]:
        while True:
            await event.wait()
            event.clear()
            if state.error is not None:
                raise state.error
            if state.is_ready:
                is_last = state.is_finished
                yield state.take()
                if is_last:
                    return

    def _close(self, state: RequestState) -> None:
        """Forget a request, ending what the engine still computes for it."""
        del self._events[state.request.key]
        self._request_ids.pop(state.request.request_id, None)
        self.traces.close(state, time.monotonic())
        if keys := self._frontend.drop(state):
            self._client.abort(keys)

    @staticmethod
    def _keys(state: RequestState) -> list[int]:
        return [state.request.key + item.index for item in state.sequences if not item.is_finished]


def _num_characters(prompt: Prompt) -> int:
    match prompt:
        case TextPrompt():
            return len(prompt.text)
        case ChatPrompt():
            return sum(len(str(message.get("content"))) for message in prompt.messages)
        case TokenPrompt():
            return 0
