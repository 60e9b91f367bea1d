"""Bodies of ``POST /tokenize`` and ``POST /detokenize``."""

from typing import Any

from pydantic import Field

from cardan.server.protocol.chat import Documents, Messages, TemplateKwargs
from cardan.server.protocol.fields import Body, Text, TokenIds


class TokenizeRequest(Body):
    """Either ``prompt`` or ``messages``. ``add_special_tokens``: on for text, off for chats."""

    model: str | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    tools: list[dict[str, Any]] | None = None
    documents: Documents | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: TemplateKwargs = Field(default_factory=dict)
    return_token_strs: bool = False


class DetokenizeRequest(Body):
    """Token ids to turn into text, special tokens included."""

    model: str | None = None
    tokens: TokenIds
