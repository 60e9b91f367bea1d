"""A request of a benchmark's load, and its body for each endpoint of OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from cardan.core.types.errors import ConfigError

Endpoint = Literal["completions", "chat"]
ENDPOINT_PATHS: Mapping[Endpoint, str] = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    """What one request asks for; exactly one of the three prompts is given.

    Attributes:
        text: prompt as text.
        token_ids: prompt as token ids, for servers whose completions take them.
        messages: conversation in OpenAI's form.
        max_tokens: most tokens of the answer.
        prompt_len: tokens of the prompt as far as known here; None: the server will say.
        extra_body: entries of the body that are this request's own.
    """

    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    max_tokens: int
    prompt_len: int | None = None
    extra_body: Mapping[str, Any] = field(default_factory=dict)


def request_body(
    request: BenchRequest, endpoint: Endpoint, common: Mapping[str, Any] | None = None
) -> bytes:
    """JSON body of a streamed request that reports its token counts.

    Args:
        common: entries of every body, such as the model; they win over the defaults here, and the
            request's own win over them.

    Raises:
        ConfigError: the endpoint cannot take this kind of prompt.
    """
    body: dict[str, Any] = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": request.max_tokens,
        **(common or {}),
        **request.extra_body,
    }
    if endpoint == "chat":
        body["messages"] = _messages(request)
    else:
        body["prompt"] = _prompt(request)
    return msgspec.json.encode(body)


def _messages(request: BenchRequest) -> Any:
    if request.messages is not None:
        return request.messages
    if request.text is None:
        raise ConfigError(
            "endpoint: chat takes no token ids; use --endpoint completions, or text prompts"
        )
    return [{"role": "user", "content": request.text}]


def _prompt(request: BenchRequest) -> Any:
    if request.text is not None:
        return request.text
    if request.token_ids is None:
        raise ConfigError("endpoint: completions takes no messages; use --endpoint chat")
    return request.token_ids
