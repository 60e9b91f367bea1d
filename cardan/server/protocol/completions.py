"""Body of ``POST /v1/completions``."""

from typing import Annotated, Any

from pydantic import AfterValidator, Field

from cardan.server.protocol.fields import TOKEN_ID, Int, whole
from cardan.server.protocol.generation import GenerationRequest

MAX_CHOICES = 2048
DEFAULT_MAX_TOKENS = 16
PromptItem = str | list[int]
_IDS_SCHEMA: dict[str, Any] = {
    "type": "array",
    "minItems": 1,
    "items": {"type": "integer", "minimum": 0, "title": TOKEN_ID},
}


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _whole_items(value: list[Any]) -> list[Any]:
    """5.0 is an integer in JSON."""
    if any(type(item) is float for item in value):
        return [whole(item) for item in value]
    return value


def _checked_prompt(value: Any) -> list[PromptItem]:
    """One item a prompt, whichever of the four forms came."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string, a list of strings, token ids or lists of token ids")
    items = _whole_items(value)
    if _is_ids(items):
        return [items]
    if all(isinstance(item, str) for item in items):
        return items
    items = [_whole_items(item) if isinstance(item, list) else item for item in items]
    if all(_is_ids(item) for item in items):
        return items
    raise ValueError("must hold only strings, only token ids (integers >= 0) or only lists of them")


class CompletionRequest(GenerationRequest):
    """A text completion; ``prompt`` becomes a list with one item a prompt."""

    prompt: Annotated[Any, AfterValidator(_checked_prompt)] = Field(
        json_schema_extra={
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
                _IDS_SCHEMA,
                {"type": "array", "minItems": 1, "items": _IDS_SCHEMA},
            ]
        }
    )
    max_tokens: Int | None = Field(default=DEFAULT_MAX_TOKENS, ge=0)
    logprobs: Int | None = Field(default=None, ge=-1)
    add_special_tokens: bool = True
