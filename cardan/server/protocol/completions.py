"""Body of ``POST /v1/completions``."""

from typing import Annotated, Any

from pydantic import AfterValidator, Field

from cardan.server.protocol.fields import Int
from cardan.server.protocol.generation import GenerationRequest

MAX_CHOICES = 2048
DEFAULT_MAX_TOKENS = 16
PromptItem = str | list[int]


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _checked_prompt(value: Any) -> list[PromptItem]:
    """One item a prompt, whichever of the four forms came."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string, a list of strings, token ids or lists of token ids")
    if _is_ids(value):
        return [value]
    if all(isinstance(item, str) for item in value):
        return value
    if all(_is_ids(item) for item in value):
        return value
    raise ValueError("must hold only strings, only token ids (integers >= 0) or only lists of them")


class CompletionRequest(GenerationRequest):
    """A text completion; ``prompt`` becomes a list with one item a prompt."""

    prompt: Annotated[Any, AfterValidator(_checked_prompt)] = Field(
        json_schema_extra={
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
                {"type": "array", "items": {"type": "integer"}},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
            ]
        }
    )
    max_tokens: Int | None = Field(default=DEFAULT_MAX_TOKENS, ge=0)
    logprobs: Int | None = Field(default=None, ge=-1)
    add_special_tokens: bool = True
