"""Calls that models write as JSON objects."""

import json
from collections.abc import Sequence
from typing import Any

# Under these names models put the arguments.
ARGUMENT_KEYS = ("arguments", "parameters")


def read_call(text: str) -> tuple[str, str] | None:
    """Name and arguments, as the text of a JSON object, of one call; None: it is no call."""
    try:
        read = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(read, dict) or not isinstance(read.get("name"), str) or not read["name"]:
        return None
    arguments = _arguments(read, ARGUMENT_KEYS)
    return None if arguments is None else (read["name"], arguments)


def _arguments(call: dict[str, Any], keys: Sequence[str]) -> str | None:
    value: Any = next((call[key] for key in keys if key in call), {})
    if isinstance(value, str):
        # Some models quote the object once more.
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    if not isinstance(value, dict):
        return None
    return json.dumps(value, ensure_ascii=False)


class ObjectEnd:
    """Finds where a JSON object ends while its text comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def find(self, text: str) -> int | None:
        """Length of ``text`` up to and with the closing brace; None: it is not in there yet.

        The first text begins with the opening brace.
        """
        for place, char in enumerate(text):
            if self._in_string:
                self._read_string(char)
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return place + 1
        return None

    def _read_string(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._in_string = False
