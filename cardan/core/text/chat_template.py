"""Chat templates: messages to prompt text, as Hugging Face models define it in Jinja.

The template comes with the model and is untrusted: it runs in a sandbox, sees plain data only, and
whatever goes wrong inside it is a `TextError` of the request.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jinja2

from cardan.core.text.errors import TextError
from cardan.core.text.template_sandbox import DEADLINE, TemplateSandbox

MAX_PROMPT_CHARS = 32 * 1024 * 1024
# A long conversation renders within a fraction of a second.
MAX_RENDER_SECONDS = 5.0
# Stands in the final message while it is rendered; the trailing space tells whether the template
# trims messages.
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
# Names under which clients send a message's reasoning, most current first.
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """One compiled chat template; rendering is safe from several threads."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        max_chars: int = MAX_PROMPT_CHARS,
        max_seconds: float = MAX_RENDER_SECONDS,
    ) -> None:
        """Compile `source`.

        Args:
            source: the Jinja text.
            special_tokens: variables such as ``bos_token``; arguments of `render` go before them.
            max_chars: most characters that a prompt may have.
            max_seconds: longest time that a rendering may take, watched at loops and calls.

        Raises:
            TextError: the template has a syntax error.
        """
        self._source = source
        self._special_tokens = MappingProxyType(dict(special_tokens))
        self._max_chars = max_chars
        self._max_seconds = max_seconds
        try:
            self._template = TemplateSandbox(max_chars).from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TextError(
                f"the chat template has a syntax error in line {error.lineno}: {error.message}"
            ) from error
        except (RecursionError, SyntaxError, MemoryError) as error:
            raise TextError(f"the chat template cannot be compiled: {error}") from error

    @property
    def source(self) -> str:
        """The Jinja text."""
        return self._source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The prompt text of a conversation, equal to transformers' ``apply_chat_template``.

        Args:
            messages: plain data, one mapping a message; a key whose value is None counts as absent.
            tools: JSON schemas of functions.
            documents: mappings for retrieval templates.
            add_generation_prompt: end with the header of a new assistant message.
            continue_final_message: end inside the last message, so that the model goes on with it;
                needs `add_generation_prompt` off.
            **kwargs: further template variables.

        Raises:
            TextError: bad arguments, or the template failed, refused or wrote too much.
        """
        if continue_final_message and add_generation_prompt:
            raise TextError(
                "continue_final_message and add_generation_prompt exclude each other; "
                "set add_generation_prompt to false"
            )
        chat = _plain_messages(messages)
        final_text = self._tag_final_message(chat) if continue_final_message else None
        variables = {
            **self._special_tokens,
            **{name: _plain(value, name) for name, value in kwargs.items()},
            "messages": chat,
            "tools": _plain_objects(tools, "tools"),
            "documents": _plain_objects(documents, "documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._run(variables)
        return text if final_text is None else _cut_at_tag(text, final_text)

    def _run(self, variables: Mapping[str, Any]) -> str:
        pieces: list[str] = []
        length = 0
        deadline = {DEADLINE: time.monotonic() + self._max_seconds}
        try:
            for piece in self._template.generate({**variables, **deadline}):
                length += len(piece)
                if length > self._max_chars:
                    raise TextError(
                        f"the chat template wrote more than {self._max_chars} characters; "
                        "send fewer or shorter messages"
                    )
                pieces.append(piece)
        except TextError:
            raise
        except jinja2.TemplateError as error:
            raise TextError(f"the chat template failed: {error.message or error}") from error
        except Exception as error:  # Untrusted code: whatever it raises is a fault of the input.
            detail = f"{type(error).__name__}: {error}"
            raise TextError(f"the chat template failed: {detail}") from error
        return "".join(pieces)

    def _tag_final_message(self, chat: list[dict[str, Any]]) -> str:
        """Append the tag to the last message's text and return that text."""
        final = chat[-1]
        content = final.get("content")
        if content is None:
            raise TextError("continue_final_message: the final message has no content to continue")
        if "content" not in self._source:
            raise TextError("continue_final_message: the chat template does not read the content")
        if isinstance(content, str):
            final["content"] = content + _CONTINUE_TAG
            return content
        blocks = content if isinstance(content, list | tuple) else []
        for block in reversed(blocks):
            if isinstance(block, dict) and isinstance(block.get("text"), str):
                text = str(block["text"])
                block["text"] = text + _CONTINUE_TAG
                return text
        raise TextError("continue_final_message: the final message has no text to continue")


def _cut_at_tag(text: str, final_text: str) -> str:
    tag = _CONTINUE_TAG.strip()
    start = text.rfind(tag)
    if start < 0 or final_text.strip() not in text:
        raise TextError(
            "continue_final_message: the final message is not in the rendered prompt; this chat "
            "template drops or rewrites it"
        )
    if text.startswith(_CONTINUE_TAG, start):
        return text[:start]
    # The template trims messages, so the text before the tag has to lose its spaces too.
    return text[:start].rstrip()


def _plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A fresh plain copy of the messages: absent keys dropped, reasoning under all its names."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise TextError("messages must be a list of objects")
    if not messages:
        raise TextError("messages is empty; give at least one message")
    chat = []
    for message in _plain_objects(messages, "messages") or []:
        kept = {key: value for key, value in message.items() if value is not None}
        reasoning = next((kept[key] for key in _REASONING_FIELDS if key in kept), None)
        if reasoning is not None:
            kept = {"thinking": reasoning, **kept, "reasoning_content": reasoning}
        chat.append(kept)
    return chat


def _plain_objects(
    values: Iterable[Mapping[str, Any]] | None, where: str
) -> list[dict[str, Any]] | None:
    if values is None:
        return None
    result = []
    for index, value in enumerate(values):
        if not isinstance(value, Mapping):
            raise TextError(f"{where}[{index}] is a {type(value).__name__}; give an object")
        result.append(_plain(value, f"{where}[{index}]"))
    return result


def _plain(value: object, where: str) -> Any:
    """Rebuild a value from exact JSON types: no object of ours is in reach of the template."""
    try:
        return _rebuild(value, where)
    except RecursionError as error:
        raise TextError(f"{where} is nested too deep") from error


def _rebuild(value: object, where: str) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {str(key): _rebuild(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rebuild(item, f"{where}[{index}]") for index, item in enumerate(value)]
    raise TextError(
        f"{where} is a {type(value).__name__}; a chat template takes strings, numbers, booleans, "
        "lists and objects only"
    )
