"""``cardan run``: one answer, or a conversation on the terminal."""

import asyncio
import contextlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from cardan.cli.bootstrapping import import_bootstrap
from cardan.cli.console import EXIT_INTERRUPTED, EXIT_OK
from cardan.cli.options import EngineOptions, engine_config
from cardan.core.config.engine import EngineConfig
from cardan.core.observability.logging import configure_logging, is_debugging
from cardan.core.types.errors import InputError

if TYPE_CHECKING:
    from cardan.cli.engine_protocol import Engine
    from cardan.core.types.sampling_params import SamplingParams

# Used when neither the user nor the model names a temperature: the API's default of 1 rambles.
_CALM = {"temperature": 0.2, "top_p": 0.9}


def run(
    options: EngineOptions,
    prompt: Annotated[
        str | None,
        typer.Option(
            "--prompt", "-p", help="Answer this and exit. Without it: stdin, or a conversation."
        ),
    ] = None,
    system: Annotated[
        str | None, typer.Option("--system", help="System message.", show_default=False)
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", help="Most tokens of an answer.", show_default=False),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option("--temperature", help="0: always the likeliest token.", show_default=False),
    ] = None,
    top_p: Annotated[float | None, typer.Option("--top-p", show_default=False)] = None,
    top_k: Annotated[int | None, typer.Option("--top-k", show_default=False)] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text as it is, without a chat template.")
    ] = False,
) -> int:
    """Ask a model once (-p, or a prompt on stdin), or talk with it."""
    level = options.log_level or ("debug" if is_debugging() else "warning")
    configure_logging(level, options.log_format)
    config = engine_config(options)
    if raw and system is not None:
        raise typer.BadParameter("--system needs a chat template; leave out --raw")
    if prompt is None and not sys.stdin.isatty():
        prompt = sys.stdin.read().removesuffix("\n")
    if prompt is not None and not prompt:
        raise InputError("the prompt is empty; give one with -p or on stdin", "prompt")
    sampling = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
    }
    given = {name: value for name, value in sampling.items() if value is not None}
    with asyncio.Runner() as runner:
        engine = runner.run(_open(config))
        try:
            recommended = engine.info.generation_config.get("temperature") is not None
            given = given if recommended else {**_CALM, **given}
            params = engine.default_sampling_params().replace(**given)
            return _talk(runner, engine, params, prompt, system, raw)
        finally:
            runner.run(engine.close())


async def _open(config: EngineConfig) -> "Engine":
    return await import_bootstrap()(config, in_process=True)


def _talk(
    runner: asyncio.Runner,
    engine: "Engine",
    params: "SamplingParams",
    prompt: str | None,
    system: str | None,
    raw: bool,
) -> int:
    from cardan.cli.chat import Chat, Speaker, chat_prompt
    from cardan.core.types.prompt import TextPrompt

    speaker = Speaker(runner, engine, params, sys.stdout)
    if prompt is None:
        return Chat(speaker, system, raw, _line_reader()).talk()
    question = [{"role": "user", "content": prompt}]
    answer = speaker.answer(TextPrompt(text=prompt) if raw else chat_prompt(question, system))
    return EXIT_INTERRUPTED if answer.is_interrupted else EXIT_OK


def _line_reader() -> Callable[[str], str]:
    """``input``, with line editing and history where the interpreter has them."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (importing it is what enables it)
    return input
