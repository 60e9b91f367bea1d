"""Calls as JSON between tags, as the models of NousResearch Hermes, Qwen 2.5 and Qwen 3 write them.

The form is that of Hermes 2 Pro's published chat template.
"""

from typing import ClassVar

from cardan.core.interfaces.tool_parsing import ParsedText, ToolCallDelta, ToolParser
from cardan.plugins.tool_parsers.json_calls import read_call

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, any number of them.

    A call is told when its end is seen. White space around calls is told to nobody. What stands
    between tags and is no call remains content, with its tags.
    """

    name: ClassVar[str] = "hermes"
    contract: ClassVar[tuple[int, int]] = (1, 0)

    @classmethod
    def detect(cls, chat_template: str) -> bool:
        return OPEN in chat_template and CLOSE in chat_template

    def __init__(self) -> None:
        # What was not told: white space, what may become a tag, or a call so far.
        self._held = ""
        # Where to look for the closing tag in it; 0: there is no opening one.
        self._searched = 0
        self._num_calls = 0
        self._is_behind_call = False

    def push(self, text: str) -> ParsedText:
        self._held += text
        content: list[str] = []
        calls: list[ToolCallDelta] = []
        while self._held:
            if not self._searched:
                content.append(self._take_content())
                if not self._searched:
                    break
            end = self._held.find(CLOSE, self._searched)
            if end < 0:
                self._searched = max(self._searched, len(self._held) - len(CLOSE) + 1)
                break
            content.append(self._take_call(end, calls))
        return ParsedText("".join(content), tuple(calls))

    def finish(self) -> ParsedText:
        left, self._held = self._held, ""
        return ParsedText(self._without_gap(left))

    def _take_content(self) -> str:
        """Take what is content for certain; white space before a tag stays with the tag."""
        start = self._held.find(OPEN)
        if start >= 0:
            certain = len(self._held[:start].rstrip())
            self._searched = start - certain + len(OPEN)
        else:
            certain = len(self._held[: len(self._held) - _tag_begun(self._held)].rstrip())
        taken, self._held = self._held[:certain], self._held[certain:]
        return self._without_gap(taken)

    def _take_call(self, end: int, calls: list[ToolCallDelta]) -> str:
        """Take a call to ``calls``, or return what is none."""
        whole = self._held[: end + len(CLOSE)]
        body = whole.lstrip()[len(OPEN) : -len(CLOSE)]
        self._held, self._searched = self._held[len(whole) :], 0
        call = read_call(body)
        if call is None:
            return self._without_gap(whole)
        calls.append(ToolCallDelta(self._num_calls, *call))
        self._num_calls += 1
        self._is_behind_call = True
        return ""

    def _without_gap(self, content: str) -> str:
        """``content`` without the white space that follows a call."""
        if self._is_behind_call:
            content = content.lstrip()
            self._is_behind_call = not content
        return content


def _tag_begun(text: str) -> int:
    """Length of the longest end of ``text`` that is the beginning of a tag."""
    lengths = range(min(len(OPEN) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(OPEN[:length])), 0)
