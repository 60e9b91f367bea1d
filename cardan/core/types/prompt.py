"""Prompts before they become token ids: one internal form for every API dialect."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPrompt:
    """A prompt as text. ``add_special_tokens``: let the tokenizer add BOS and the like."""

    text: str
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPrompt:
    """A prompt as token ids, used as they are."""

    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A conversation for the chat template.

    ``messages`` are plain mappings with ``role`` and ``content`` (text), assistant tool calls with
    their arguments as objects. ``chat_template`` replaces the model's own. ``add_special_tokens``
    is for templates that do not write BOS themselves.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    chat_template: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


Prompt = TextPrompt | TokenPrompt | ChatPrompt
