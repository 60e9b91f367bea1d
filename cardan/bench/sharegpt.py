"""Requests from files: conversations in ShareGPT's form, and JSON lines of one's own."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from cardan.bench.prompts import BenchRequest
from cardan.core.types.errors import ConfigError

CountTokens = Callable[[str], int]
_ASKING = ("human", "user")
_MAX_TOKENS_FIELDS = ("max_tokens", "output_len")
_LINE_FIELDS = ("prompt", "messages", *_MAX_TOKENS_FIELDS, "extra_body")


def count_words(text: str) -> int:
    """About as many tokens as `text` has: four for three words."""
    return max(1, round(len(text.split()) * 4 / 3))


def read_sharegpt(
    path: Path, seed: int, count_tokens: CountTokens = count_words, output_len: int | None = None
) -> list[BenchRequest]:
    """First question of each conversation, in an order drawn from `seed`.

    The file is a JSON array of ``{"conversations": [{"from": "human" | "gpt", "value": text}]}``.
    Conversations that do not open with a question and an answer are left out.

    Args:
        count_tokens: length of a text; the recorded answer's is the request's ``max_tokens``.
        output_len: ``max_tokens`` of all requests instead.

    Raises:
        ConfigError: the file is not of this form; names the line or the entry.
    """
    try:
        entries = msgspec.json.decode(_read(path))
    except msgspec.DecodeError as error:
        raise ConfigError(f"dataset {path}: no valid JSON: {error}") from error
    if not isinstance(entries, list):
        raise ConfigError(f"dataset {path}: holds no JSON array; for JSON lines use custom")
    pairs = [_first_turn(path, index, entry) for index, entry in enumerate(entries)]
    usable = [pair for pair in pairs if pair is not None]
    if not usable:
        raise ConfigError(f"dataset {path}: no conversation has a question and an answer")
    random.Random(f"{seed}:sharegpt").shuffle(usable)
    return [
        BenchRequest(text=question, max_tokens=output_len or count_tokens(answer))
        for question, answer in usable
    ]


def _first_turn(path: Path, index: int, entry: Any) -> tuple[str, str] | None:
    """Question and answer; None if the conversation does not open with them."""
    turns = entry.get("conversations") if isinstance(entry, Mapping) else None
    if not isinstance(turns, list):
        raise ConfigError(f'dataset {path}, entry {index}: has no list "conversations"')
    opening = turns[:2]
    for turn in opening:
        if not isinstance(turn, Mapping) or not isinstance(turn.get("value"), str):
            raise ConfigError(
                f'dataset {path}, entry {index}: a turn needs "from" and a text "value"'
            )
    if len(opening) < 2 or opening[0].get("from") not in _ASKING:
        return None
    question, answer = opening[0]["value"], opening[1]["value"]
    return (question, answer) if question.strip() and answer.strip() else None


def read_custom(path: Path, output_len: int | None = None) -> list[BenchRequest]:
    """Requests of a JSONL file, in its order.

    A line is an object with ``prompt`` (a text or token ids) or ``messages`` (OpenAI's form),
    ``max_tokens`` or ``output_len``, and maybe ``extra_body`` (an object). Empty lines are skipped.

    Args:
        output_len: ``max_tokens`` of lines that name none.

    Raises:
        ConfigError: a line is not of this form; names the line.
    """
    lines = _read(path).splitlines()
    requests = [
        _custom_request(f"dataset {path}, line {number}", line, output_len)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not requests:
        raise ConfigError(f"dataset {path}: holds no requests")
    return requests


def _custom_request(where: str, line: bytes, output_len: int | None) -> BenchRequest:
    try:
        entry = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{where}: no valid JSON: {error}") from error
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: must be a JSON object")
    unknown = sorted(set(entry) - set(_LINE_FIELDS))
    if unknown:
        raise ConfigError(
            f"{where}: unknown field {unknown[0]}; known are {', '.join(_LINE_FIELDS)}. What the "
            "server shall get goes into extra_body"
        )
    extra = entry.get("extra_body", {})
    if not isinstance(extra, dict):
        raise ConfigError(f"{where}: extra_body must be an object")
    return BenchRequest(
        max_tokens=_max_tokens(where, entry, output_len), extra_body=extra, **_prompt(where, entry)
    )


def _max_tokens(where: str, entry: Mapping[str, Any], output_len: int | None) -> int:
    given = [entry[name] for name in _MAX_TOKENS_FIELDS if name in entry]
    if len(given) == 2:
        raise ConfigError(f"{where}: give max_tokens or output_len, not both")
    value = given[0] if given else output_len
    if value is None:
        raise ConfigError(f"{where}: names no max_tokens; add it, or give --output-len")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{where}: max_tokens is {value!r}; it must be a whole number above 0")
    return value


def _prompt(where: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """The one prompt of a line, as a field of BenchRequest."""
    if ("prompt" in entry) == ("messages" in entry):
        raise ConfigError(f"{where}: needs either prompt or messages")
    if "prompt" in entry:
        prompt = entry["prompt"]
        if isinstance(prompt, str) and prompt:
            return {"text": prompt}
        if isinstance(prompt, list) and prompt and all(type(item) is int for item in prompt):
            return {"token_ids": tuple(prompt), "prompt_len": len(prompt)}
        raise ConfigError(f"{where}: prompt must be a text or a list of token ids, and not empty")
    messages = entry["messages"]
    if (
        not isinstance(messages, list)
        or not messages
        or not all(isinstance(message, dict) and "role" in message for message in messages)
    ):
        raise ConfigError(f"{where}: messages must be a list of objects with a role")
    return {"messages": tuple(messages)}


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"dataset {path}: {error}") from error
