"""Opens engines for the faces: the client, and the text work in front of it."""

import asyncio
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from cardan.bootstrap.engine_env import engine_env, engine_env_elsewhere
from cardan.bootstrap.model_source import (
    ModelSource,
    read_chat_template,
    read_model,
    read_tokenizer,
)
from cardan.core.config.engine import EngineConfig
from cardan.core.config.engine_process import EngineProcessConfig
from cardan.core.engine.async_engine import AsyncEngine
from cardan.core.engine.client import EngineClient, EngineParts, InProcessClient
from cardan.core.engine.engine_child import EngineChild
from cardan.core.engine.supervised_client import RestartPolicy, SupervisedClient
from cardan.core.text import ChatTemplate, Tokenizer
from cardan.core.text.preprocess import Preprocessor

if TYPE_CHECKING:
    from cardan.core.runner.model_runner import PromptLogitsObserver


@dataclass(frozen=True, slots=True)
class OpenedClient:
    """A ready engine, and what its front needs."""

    client: EngineClient
    tokenizer: Tokenizer
    preprocessor: Preprocessor


def open_client(
    config: EngineConfig,
    *,
    in_process: bool,
    process: EngineProcessConfig | None = None,
    prompt_logits: "PromptLogitsObserver | None" = None,
    meanwhile: Callable[[], object] | None = None,
) -> OpenedClient:
    """Start an engine and, while it loads, read its tokenizer. Blocks until it is ready.

    In a process of its own, which ``process`` describes, it is replaced when it dies or hangs; of a
    process that is this one ``process`` says when its health turns. In this process
    ``prompt_logits`` is shown, on the engine's thread, the logits of prompts whose
    log-probabilities are wanted. ``meanwhile`` is called on a thread while the engine loads.

    Raises:
        CardanError: with the cause and the remedy; nothing is left running.
    """
    if prompt_logits is not None and not in_process:
        raise ValueError("logits are shown in this process only; set in_process")
    config.check()
    source = read_model(config.model)
    launched = threading.Event()
    settings = process or EngineProcessConfig()

    def spawn() -> EngineChild:
        try:
            return _spawn(config, settings.python)
        finally:
            launched.set()

    def start() -> EngineClient:
        if in_process:
            return InProcessClient(lambda: _build(config, prompt_logits), settings.step_timeout)
        policy = RestartPolicy(settings.max_restarts, settings.hang_timeout)
        return SupervisedClient(spawn, settings.step_timeout, policy)

    with ThreadPoolExecutor(1) as pool:
        text = pool.submit(_read_text, config, source, launched, meanwhile)
        if in_process:
            launched.set()
        try:
            client = start()
        finally:
            launched.set()  # also after an interrupt: leaving the pool waits for its thread
    try:
        tokenizer = text.result()
        template = read_chat_template(config.model)
        if template is not None:
            ChatTemplate(template, tokenizer.special_tokens)  # a bad one fails now, not later
        preprocessor = Preprocessor(tokenizer, client.info, template)
    except BaseException:
        client.close()
        raise
    return OpenedClient(client, tokenizer, preprocessor)


def _read_text(
    config: EngineConfig,
    source: ModelSource,
    launched: threading.Event,
    meanwhile: Callable[[], object] | None,
) -> Tokenizer:
    # Not before the launch: both want the interpreter, and the engine takes longer.
    launched.wait()
    if meanwhile is not None:
        meanwhile()
    return read_tokenizer(config.model, source)


async def open_async_engine(
    config: EngineConfig,
    *,
    in_process: bool,
    process: EngineProcessConfig | None = None,
    meanwhile: Callable[[], object] | None = None,
) -> AsyncEngine:
    """Start an engine for the running event loop; see ``open_client``."""
    opened = await asyncio.to_thread(
        open_client,
        config,
        in_process=in_process,
        process=process,
        meanwhile=meanwhile,
    )
    return AsyncEngine(opened.client, opened.tokenizer, opened.preprocessor)


def _build(config: EngineConfig, prompt_logits: "PromptLogitsObserver | None") -> EngineParts:
    # Imported here because it brings torch, which a process that only serves does without.
    from cardan.bootstrap.engine_builder import build_engine

    return build_engine(config, prompt_logits)


def _spawn(config: EngineConfig, python: str | None) -> EngineChild:
    platform = config.device.platform
    return EngineChild(
        [python or sys.executable, "-m", "cardan.bootstrap.engine_main"],
        msgspec.msgpack.encode(config),
        engine_env(platform) if python is None else engine_env_elsewhere(python, platform),
    )
