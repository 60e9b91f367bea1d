"""Body of ``POST /v1/chat/completions``."""

from typing import Annotated, Any

from pydantic import AfterValidator, Field

from cardan.server.protocol.fields import Int
from cardan.server.protocol.generation import GenerationRequest
from cardan.server.protocol.message_schema import MESSAGE_SCHEMA
from cardan.server.protocol.tools import ToolChoice, Tools

# Variables of a chat template that a request sets through fields of their own.
_RESERVED = (
    "messages", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "self",
)  # fmt: skip


def _checked_kwargs(value: dict[str, Any]) -> dict[str, Any]:
    for name in _RESERVED:
        if name in value:
            raise ValueError(f"must not hold {name!r}; use the request field of that name")
    return value


TemplateKwargs = Annotated[
    dict[str, Any],
    AfterValidator(_checked_kwargs),
    Field(json_schema_extra={"propertyNames": {"not": {"enum": list(_RESERVED)}}}),
]
Messages = Annotated[
    list[dict[str, Any]], Field(min_length=1, json_schema_extra={"items": MESSAGE_SCHEMA})
]
Documents = list[dict[str, Any]]


class ChatCompletionRequest(GenerationRequest):
    """A chat completion; `cardan.server.messages` reads ``messages``."""

    messages: Messages
    max_completion_tokens: Int | None = Field(default=None, ge=1)
    max_tokens: Int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: Int = Field(default=0, ge=-1)

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    documents: Documents | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: TemplateKwargs = Field(default_factory=dict)
    return_prompt_text: bool = False
