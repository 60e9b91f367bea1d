"""Tool calls in chat completions: what a request asks for, and the calls in its answers."""

import logging
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cardan.core.interfaces.tool_parsing import ParsedText, ToolCallDelta, ToolParser
from cardan.core.types.errors import InputError
from cardan.server.errors import clip
from cardan.server.protocol.chat import ChatCompletionRequest
from cardan.server.tool_format import ToolFormat

logger = logging.getLogger(__name__)

_NO_FORMAT = (
    "it is not known how this model writes tool calls; the operator can name the form with "
    "--tool-call-parser"
)


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How the answers to one request are read. ``hidden`` are texts of special tokens that content
    must not show, None where it may."""

    make_parser: Callable[[], ToolParser]
    is_parallel: bool
    hidden: re.Pattern[str] | None


def tool_use(
    body: ChatCompletionRequest, tool_format: ToolFormat | None, special_tokens: frozenset[str]
) -> ToolUse | None:
    """What ``body`` asks for; None: its answers are text.

    Raises:
        InputError: the choice does not fit the tools, or asks for what is not there.
    """
    choice = body.tool_choice or ("auto" if body.tools else "none")
    if choice == "none":
        return None
    if not body.tools:
        raise InputError("tool_choice needs tools", "tool_choice")
    _check_choice(choice, [tool["function"]["name"] for tool in body.tools])
    if tool_format is None:
        raise InputError(_NO_FORMAT, "tools")
    hidden = None
    if body.skip_special_tokens and special_tokens:
        hidden = re.compile("|".join(map(re.escape, sorted(special_tokens, key=len, reverse=True))))
    return ToolUse(tool_format, body.parallel_tool_calls, hidden)


def _check_choice(choice: str | dict[str, Any], names: list[str]) -> None:
    if choice == "auto":
        return
    if isinstance(choice, dict):
        name = choice["function"]["name"]
        if name not in names:
            raise InputError(
                f"tool_choice names {clip(name, 64)!r}, which is none of the tools", "tool_choice"
            )
    raise InputError(
        "tool_choice can be 'auto' or 'none'; a forced call needs output constraints, which are "
        "not supported yet",
        "tool_choice",
    )


class ToolCallReader:
    """Tells calls from content in one answer, and writes both in OpenAI's form."""

    def __init__(self, use: ToolUse) -> None:
        self._use = use
        self._parser: ToolParser | None = use.make_parser()
        self.has_called = False

    def read(self, text: str, is_last: bool) -> dict[str, Any]:
        """The delta for the next ``text`` of the answer; empty if it tells nothing yet."""
        parts = [self._ask(lambda parser: parser.push(text), text)] if text else []
        if is_last:
            parts.append(self._ask(lambda parser: parser.finish(), ""))
        content = "".join(part.content for part in parts)
        if self._use.hidden is not None:
            content = self._use.hidden.sub("", content)
        calls = [self._write(call) for part in parts for call in part.calls if self._wants(call)]
        delta: dict[str, Any] = {"content": content} if content else {}
        if calls:
            self.has_called = True
            delta["tool_calls"] = calls
        return delta

    def _ask(self, question: Callable[[ToolParser], ParsedText], text: str) -> ParsedText:
        """The parser's answer; one that fails is not asked again, and what comes is content."""
        if self._parser is None:
            return ParsedText(text)
        try:
            return question(self._parser)
        except Exception:
            logger.exception("tool parser %s failed; this answer goes on as text", self._name)
            self._parser = None
            return ParsedText(text)

    @property
    def _name(self) -> str:
        return str(getattr(self._use.make_parser, "name", self._use.make_parser))

    def _wants(self, call: ToolCallDelta) -> bool:
        return self._use.is_parallel or call.index == 0

    @staticmethod
    def _write(call: ToolCallDelta) -> dict[str, Any]:
        if call.name is None:
            return {"index": call.index, "function": {"arguments": call.arguments}}
        return {
            "index": call.index,
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }


def add_calls(message: dict[str, Any], deltas: list[dict[str, Any]]) -> None:
    """Append the calls of one delta to a whole message."""
    calls = message.setdefault("tool_calls", [])
    for delta in deltas:
        if "id" in delta:
            calls.append({name: delta[name] for name in ("id", "type")})
            calls[-1]["function"] = dict(delta["function"])
        else:
            calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
