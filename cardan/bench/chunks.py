"""What one streamed chunk of OpenAI's API says: whether it carries tokens, its text, the usage.

Servers differ in what else they send, so all is optional and unknown fields are passed over.
"""

from __future__ import annotations

from typing import Any

import msgspec

from cardan.bench.record import RequestRecord


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_DECODER = msgspec.json.Decoder(_Chunk)


class AnswerFold:
    """Adds up the chunks of one answer in its record.

    A chunk carries tokens if it has text, reasoning, tool calls or token ids. It counts as many
    tokens as it lists ids, else as many as its running usage grew by, else 1.
    """

    def __init__(self, record: RequestRecord, keep_text: bool) -> None:
        self._record = record
        self._keep_text = keep_text
        self._texts: list[str] = []
        self._reported = 0  # completion tokens of the last usage seen
        self.is_finished = False
        self.has_usage = False

    def add(self, data: bytes, now: float) -> str | None:
        """Take one event's data that came at `now`; returns what is wrong with it, if anything."""
        try:
            chunk = _DECODER.decode(data)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            return f"bad event: {error}"
        if chunk.error is not None:
            return f"stream error: {error_message(chunk.error)}"
        grown = self._add_usage(chunk.usage)
        if chunk.choices:
            self._add_choices(chunk.choices, grown, now)
        return None

    def close(self) -> None:
        """Write totals to the record once the answer has ended."""
        if not self.has_usage:
            self._record.output_tokens = sum(self._record.chunk_tokens)
        self._record.text = "".join(self._texts)

    def _add_usage(self, usage: _Usage | None) -> int:
        """Take the totals; returns by how many tokens the answer has grown since the last."""
        if usage is None or usage.completion_tokens is None:
            return 0
        grown = usage.completion_tokens - self._reported
        self._reported = usage.completion_tokens
        self.has_usage = True
        self._record.output_tokens = usage.completion_tokens
        if usage.prompt_tokens is not None:
            self._record.prompt_tokens = usage.prompt_tokens
        return grown

    def _add_choices(self, choices: list[_Choice], grown: int, now: float) -> None:
        record = self._record
        record.end = now
        num_ids, has_tokens = 0, False
        for choice in choices:
            text = _text(choice)
            num_ids += len(choice.token_ids or ())
            has_tokens |= bool(text or choice.token_ids or (choice.delta or _Delta()).tool_calls)
            self.is_finished |= choice.finish_reason is not None
            if self._keep_text:
                self._texts.append(text)
        if not has_tokens:
            return
        if record.first_token is None:
            record.first_token = now
        record.token_times.append(now)
        record.chunk_tokens.append(num_ids or max(grown, 1))


def _text(choice: _Choice) -> str:
    if choice.delta is None:
        return choice.text or ""
    delta = choice.delta
    return (delta.reasoning_content or delta.reasoning or "") + (delta.content or "")


def error_message(error: Any) -> str:
    """One line of an error in OpenAI's form, or in any other."""
    if isinstance(error, dict):
        error = error.get("message", error)
    return " ".join(str(error).split())[:300]
