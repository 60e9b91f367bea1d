"""Calls as bare JSON objects, as the models of Llama 3.1, 3.2 and 3.3 write them.

The form is that of Meta's published prompt format for JSON-based tool calling.
"""

from typing import ClassVar

from cardan.core.interfaces.tool_parsing import ParsedText, ToolCallDelta, ToolParser
from cardan.plugins.tool_parsers.json_calls import ObjectEnd, read_call

TAG = "<|python_tag|>"
_ASKED_FOR = '{"name": function name, "parameters": dictionary'
_BETWEEN = " \t\r\n;"


class Llama3JsonParser(ToolParser):
    """``{"name": ..., "parameters": {...}}`` from the answer's beginning on, after a tag or not;
    further ones may follow, apart by semicolons.

    A call is told when its last brace is seen. An answer that begins with anything else, and what
    follows something that is no call, is content.
    """

    name: ClassVar[str] = "llama3_json"
    contract: ClassVar[tuple[int, int]] = (1, 0)

    @classmethod
    def detect(cls, chat_template: str) -> bool:
        return _ASKED_FOR in chat_template

    def __init__(self) -> None:
        # What was not told: what stands between calls, and a call so far from ``_start`` on.
        self._held = ""
        self._start: int | None = None
        self._end = ObjectEnd()
        self._num_calls = 0
        self._is_content = False

    def push(self, text: str) -> ParsedText:
        calls: list[ToolCallDelta] = []
        while text and not self._is_content:
            text = self._take_call(text, calls) if self._start is not None else self._begin(text)
        return ParsedText(self._release() + text if self._is_content else "", tuple(calls))

    def finish(self) -> ParsedText:
        # Behind calls nothing is left but what stands between them.
        is_gap = self._num_calls > 0 and self._start is None
        self._is_content = True
        left = self._release()
        return ParsedText("" if is_gap else left)

    def _begin(self, text: str) -> str:
        """Look for a call's first brace; the text from there on."""
        whole = self._held + text
        at = len(whole) - len(whole.lstrip(_BETWEEN if self._num_calls else None))
        if not self._num_calls and whole.startswith(TAG, at):
            at += len(TAG)
            at += len(whole[at:]) - len(whole[at:].lstrip())
        if whole.startswith("{", at):
            self._held = "" if self._num_calls else whole[:at]
            self._start, self._end = len(self._held), ObjectEnd()
            return whole[at:]
        may_begin = at == len(whole) or (not self._num_calls and TAG.startswith(whole[at:]))
        if may_begin:
            self._held = whole
            return ""
        self._is_content = True
        self._held = "" if self._num_calls else whole[:at]
        return whole[at:]

    def _take_call(self, text: str, calls: list[ToolCallDelta]) -> str:
        """Read on in a call; the text behind its end."""
        length = self._end.find(text)
        self._held += text[:length]
        if length is None:
            return ""
        call = read_call(self._held[self._start :])
        if call is None:
            self._is_content = True
            return text[length:]
        calls.append(ToolCallDelta(self._num_calls, *call))
        self._num_calls += 1
        self._held, self._start = "", None
        return text[length:]

    def _release(self) -> str:
        left, self._held = self._held, ""
        return left
