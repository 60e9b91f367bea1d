"""The offline API: many prompts in, many answers out, in this process."""

import itertools
import queue
import sys
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any, Self

from cardan.bootstrap import open_client
from cardan.core.config.cache import CacheConfig
from cardan.core.config.device import DeviceConfig
from cardan.core.config.engine import EngineConfig
from cardan.core.config.model import ModelConfig
from cardan.core.config.parallel import ParallelConfig
from cardan.core.config.plugins import PluginConfig
from cardan.core.config.scheduler import SchedulerConfig
from cardan.core.engine.async_engine import default_sampling_params
from cardan.core.engine.client import EngineClient
from cardan.core.engine.frontend import Frontend
from cardan.core.engine.messages import SleepMode
from cardan.core.text.postprocess import RequestState
from cardan.core.text.tokenizer import Tokenizer
from cardan.core.types.engine_info import EngineInfo
from cardan.core.types.errors import ConfigError, EngineDeadError, InputError
from cardan.core.types.outputs import EngineStats, RequestOutput, StepOutputs
from cardan.core.types.prompt import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from cardan.core.types.sampling_params import OutputKind, SamplingParams

# What ``generate`` takes for one prompt besides the prompt types: text, token ids, or a mapping
# with ``prompt`` or ``prompt_token_ids``.
PromptLike = str | Sequence[int] | Mapping[str, Any] | Prompt
Messages = Sequence[Mapping[str, Any]]
Params = SamplingParams | Sequence[SamplingParams] | None

_SECTIONS: dict[str, type[Any]] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "device": DeviceConfig,
    "parallel": ParallelConfig,
    "plugins": PluginConfig,
}
# Batches of at least this many requests show a progress bar on a terminal.
_PROGRESS_FROM = 8


def config_from_settings(model: str, settings: Mapping[str, Any]) -> EngineConfig:
    """An engine configuration from flat settings, each named as in its section.

    Raises:
        ConfigError: an unknown name; the nearest one is suggested.
    """
    homes = {item.name: name for name, cls in _SECTIONS.items() for item in fields(cls)}
    values: dict[str, dict[str, Any]] = {name: {} for name in _SECTIONS}
    values["model"]["model"] = model
    for name, value in settings.items():
        if name not in homes or name == "model":
            near = get_close_matches(name, homes, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"unknown setting {name}{hint}")
        values[homes[name]][name] = value
    return EngineConfig(**{name: cls(**values[name]) for name, cls in _SECTIONS.items()})


@dataclass(slots=True)
class _Inbox:
    """Engine outputs on their way from the engine's thread to the caller's."""

    items: "queue.SimpleQueue[StepOutputs | str]" = field(default_factory=queue.SimpleQueue)

    def on_outputs(self, outputs: StepOutputs) -> None:
        self.items.put(outputs)

    def on_death(self, reason: str) -> None:
        self.items.put(reason)


class LLM:
    """A model in this process.

    Settings are those of the configuration sections by their plain names (``dtype``,
    ``max_model_len``, ``kv_cache_memory_bytes``, ``max_num_seqs``, ``platform``, ...). Close it, or
    use it in a ``with`` block, to get the memory back. One thread calls it at a time.

    Raises:
        CardanError: the model cannot be opened; the message has the cause and the remedy.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        opened = open_client(config_from_settings(model, settings), in_process=True)
        self._client: EngineClient | None = opened.client
        self._tokenizer = opened.tokenizer
        self._preprocessor = opened.preprocessor
        self._frontend = Frontend(opened.tokenizer)
        self._inbox = _Inbox()
        self._info = opened.client.info
        self._request_ids = itertools.count()
        opened.client.connect(self._inbox)
        self._finalizer = weakref.finalize(self, opened.client.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def info(self) -> EngineInfo:
        """What the engine is: model, device, context, cache."""
        return self._info

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; outputs in input order.

        A prompt is text, a list of token ids, or ``{"prompt": ...}`` / ``{"prompt_token_ids":
        ...}``. ``sampling_params`` is one for all or one for each; None: what the model's authors
        recommend. ``use_tqdm``: show progress on a terminal when the batch is long.

        Raises:
            InputError: a prompt or parameter is unusable; nothing of the batch has run.
            RequestFailedError: a request could not be computed; the rest is dropped.
            EngineAsleepError: it sleeps; call ``wake_up`` first.
        """
        return self._run(_as_prompts(prompts), sampling_params, use_tqdm, priority)

    def chat(  # noqa: PLR0913  (names that users of other engines know, by keyword only)
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or several; the same token ids as the server's."""
        if not messages:
            raise InputError("messages must not be empty", "messages")
        many = not isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = messages if many else [messages]
        prompts = [
            ChatPrompt(
                messages=conversation,
                tools=tools,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                template_kwargs=chat_template_kwargs or {},
            )
            for conversation in conversations
        ]
        return self._run(prompts, sampling_params, use_tqdm, None)

    def get_tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Sampling settings that the model's authors recommend."""
        return default_sampling_params(self._info.generation_config)

    def get_metrics(self) -> EngineStats:
        """The newest gauges, and totals of the counters."""
        return self._frontend.stats()

    def reset_prefix_cache(self) -> None:
        self._live_client().reset_prefix_cache()

    def sleep(self, level: int = 1, mode: SleepMode = "wait") -> None:
        """Give the device's memory back until ``wake_up``; returns when it sleeps.

        Level 1 keeps the weights on the host, level 2 drops them, to be loaded again. Cached
        prefixes are forgotten. Asking again for the same level does no harm.

        Raises:
            UnsupportedError: the device cannot sleep.
            InputError: there is no such level or mode, or it sleeps at another level.
            RequestFailedError: the host cannot keep the weights; all is as before.
        """
        self._live_client().sleep(level, mode).result()

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory of ``weights``, of ``kv_cache``, or of both (None) again.

        Raises:
            InputError: there is no such tag.
            RequestFailedError: it does not fit, or the weights are gone; try again.
        """
        self._live_client().wake_up(tags).result()

    @property
    def is_sleeping(self) -> bool:
        """Whether ``generate`` refuses (``EngineAsleepError``) until ``wake_up``."""
        return self._live_client().sleep_level > 0

    def close(self) -> None:
        """Stop the engine and free its memory. Idempotent."""
        self._client = None
        self._finalizer()

    # -- running a batch -----------------------------------------------------------------------

    def _run(
        self,
        prompts: Sequence[Prompt],
        sampling_params: Params,
        show_progress: bool,
        priority: Sequence[int] | None,
    ) -> list[RequestOutput]:
        client = self._live_client()
        if priority is not None and len(priority) != len(prompts):
            raise InputError(f"{len(priority)} priorities for {len(prompts)} prompts", "priority")
        requests = []
        for place, (prompt, params) in enumerate(
            zip(prompts, self._params_for(sampling_params, len(prompts)), strict=True)
        ):
            request = self._preprocessor.to_request(
                self._preprocessor.encode(prompt, params),
                params,
                request_id=str(next(self._request_ids)),
                priority=priority[place] if priority else 0,
            )
            requests.append((request, prompt.text if isinstance(prompt, TextPrompt) else None))
        states = [self._frontend.open(request, text) for request, text in requests]
        try:
            for request, _text in requests:
                client.submit(request)
            with _progress(len(states), show_progress) as advance:
                self._wait(client, states, advance)
        finally:
            left = [key for state in states for key in self._frontend.drop(state)]
            if left and self._client is not None:
                client.abort(left)
        for state in states:
            if state.error is not None:
                raise state.error
        return [state.take() for state in states]

    def _wait(
        self, client: EngineClient, states: Sequence[RequestState], advance: "_Advance"
    ) -> None:
        unfinished = {id(state) for state in states}
        while unfinished:
            item = self._inbox.items.get()
            if isinstance(item, str):
                raise EngineDeadError(item)
            changes = self._frontend.apply(item, time.monotonic())
            if changes.keys_to_abort:
                client.abort(changes.keys_to_abort)
            for state in changes.states:
                if state.is_finished and id(state) in unfinished:
                    unfinished.remove(id(state))
                    advance(1)
                    if state.error is not None:
                        return

    def _params_for(self, given: Params, count: int) -> list[SamplingParams]:
        if given is None:
            given = self.get_default_sampling_params()
        if isinstance(given, SamplingParams):
            # One for all, so that it is checked once.
            return [replace(given, output_kind=OutputKind.FINAL_ONLY)] * count
        params = list(given)
        if len(params) != count:
            raise InputError(
                f"{len(params)} sampling_params for {count} prompts; give one, or one for each",
                "sampling_params",
            )
        return [replace(item, output_kind=OutputKind.FINAL_ONLY) for item in params]

    def _live_client(self) -> EngineClient:
        if self._client is None:
            raise EngineDeadError("this LLM is closed")
        return self._client


def _as_prompts(prompts: PromptLike | Sequence[PromptLike]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping | TextPrompt | TokenPrompt | ChatPrompt):
        return [_as_prompt(prompts)]
    if len(prompts) and isinstance(prompts[0], int):
        return [_as_prompt(prompts)]
    return [_as_prompt(prompt) for prompt in prompts]


def _as_prompt(prompt: Any) -> Prompt:
    match prompt:
        case TextPrompt() | TokenPrompt() | ChatPrompt():
            return prompt
        case str():
            return TextPrompt(text=prompt)
        case {"prompt_token_ids": token_ids}:
            return TokenPrompt(token_ids=token_ids)
        case {"prompt": str() as text}:
            return TextPrompt(text=text)
        case Sequence():
            return TokenPrompt(token_ids=prompt)
    raise InputError(
        f"a prompt is text, token ids, or a mapping with prompt or prompt_token_ids; got a "
        f"{type(prompt).__name__}",
        "prompt",
    )


class _Advance:
    """Counts finished requests; does nothing."""

    def __call__(self, count: int) -> None: ...


@contextmanager
def _progress(total: int, wanted: bool) -> Iterator[_Advance]:
    if not wanted or total < _PROGRESS_FROM or not sys.stderr.isatty():
        yield _Advance()
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("requests", total=total)

        class Bar(_Advance):
            def __call__(self, count: int) -> None:
                bar.advance(task, count)

        yield Bar()
