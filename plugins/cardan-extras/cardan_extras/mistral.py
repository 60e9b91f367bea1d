"""A tool parser: calls as one JSON list behind a token, as Mistral's models write them."""

import json
from typing import Any, ClassVar

from cardan.core.interfaces.tool_parsing import ParsedText, ToolCallDelta, ToolParser

TOKEN = "[TOOL_CALLS]"


class MistralParser(ToolParser):
    """``[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`` at the end of an answer.

    Calls are told when the answer ends. What follows the token and is no list of calls remains
    content, with the token.
    """

    name: ClassVar[str] = "mistral"
    contract: ClassVar[tuple[int, int]] = (1, 0)

    @classmethod
    def detect(cls, chat_template: str) -> bool:
        return TOKEN in chat_template

    def __init__(self) -> None:
        # What was not told: the token with all behind it, or what may become the token.
        self._held = ""
        self._has_token = False

    def push(self, text: str) -> ParsedText:
        self._held += text
        if self._has_token:
            return ParsedText()
        start = self._held.find(TOKEN)
        self._has_token = start >= 0
        if not self._has_token:
            start = len(self._held) - _token_begun(self._held)
        content, self._held = self._held[:start], self._held[start:]
        return ParsedText(content)

    def finish(self) -> ParsedText:
        left, self._held = self._held, ""
        calls = _read_calls(left.removeprefix(TOKEN)) if self._has_token else None
        return ParsedText(left) if calls is None else ParsedText(calls=calls)


def _read_calls(text: str) -> tuple[ToolCallDelta, ...] | None:
    try:
        read = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(read, list) or not all(map(_is_call, read)):
        return None
    return tuple(
        ToolCallDelta(index, call["name"], json.dumps(call["arguments"], ensure_ascii=False))
        for index, call in enumerate(read)
    )


def _is_call(item: Any) -> bool:
    return (
        isinstance(item, dict)
        and isinstance(item.get("name"), str)
        and isinstance(item.get("arguments"), dict)
    )


def _token_begun(text: str) -> int:
    """Length of the longest end of ``text`` that is the beginning of the token."""
    lengths = range(min(len(TOKEN) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(TOKEN[:length])), 0)
