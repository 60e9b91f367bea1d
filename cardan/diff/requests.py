"""The requests that both sides get: a few that are shipped, or a file of request bodies."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cardan.core.types.errors import ConfigError
from cardan.core.types.prompt import ChatPrompt, Prompt, TextPrompt, TokenPrompt


@dataclass(frozen=True, slots=True)
class DiffRequest:
    """A prompt, and how many tokens are to follow it at most (None: as the command says)."""

    prompt: Prompt
    max_tokens: int | None = None


DEFAULT_REQUESTS: tuple[DiffRequest, ...] = tuple(
    DiffRequest(TextPrompt(text=text))
    for text in (
        "The capital of France is",
        "1, 1, 2, 3, 5, 8,",
        "Once upon a time, in a village at the foot of a mountain, there lived an old clockmaker "
        "who had never once been late. One morning",
    )
)


def read_requests(path: Path) -> tuple[DiffRequest, ...]:
    """Read a file of one JSON object a line: bodies of completions (``prompt``: text or token ids)
    or of chats (``messages``). ``max_tokens`` counts; other fields of a body do not, since both
    sides always take the likeliest token.

    Raises:
        ConfigError: the file cannot be read, or a line is no such body.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--requests {path}: cannot be read: {error}") from None
    found = [
        _request(f"--requests {path}, line {number}", line)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not found:
        raise ConfigError(f"--requests {path}: holds no request; write one JSON body a line")
    return tuple(found)


def _request(place: str, line: str) -> DiffRequest:
    try:
        body = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{place}: is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ConfigError(f"{place}: must be an object with prompt or messages")
    most = body.get("max_tokens", body.get("max_completion_tokens"))
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
        raise ConfigError(f"{place}: max_tokens is {most!r}, must be a whole number of at least 1")
    return DiffRequest(_prompt(place, body), most)


def _prompt(place: str, body: Mapping[str, Any]) -> Prompt:
    messages, prompt = body.get("messages"), body.get("prompt")
    if (messages is None) == (prompt is None):
        raise ConfigError(f"{place}: needs either prompt or messages")
    if isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages):
        return ChatPrompt(messages=messages)
    if isinstance(prompt, str) and prompt:
        return TextPrompt(text=prompt)
    if isinstance(prompt, list) and prompt and all(type(item) is int for item in prompt):
        return TokenPrompt(token_ids=prompt)
    raise ConfigError(
        f"{place}: prompt must be text or a list of token ids, messages a list of objects; "
        "neither may be empty"
    )
