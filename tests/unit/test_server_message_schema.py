"""The document's schema of a chat message and the reader of messages take the same ones."""

import copy
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest

from cardan.core.types.errors import InputError
from cardan.server.messages import read_messages
from cardan.server.protocol.message_schema import MESSAGE_SCHEMA

MESSAGE = {
    "role": "assistant",
    "content": [
        "plain",
        {"type": "text", "text": "a"},
        {"text": "b"},
        {"type": "refusal", "refusal": "no"},
        {"type": "thinking", "thinking": "hm"},
    ],
    "reasoning": "r",
    "reasoning_content": "s",
    "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
        {"id": "2", "type": "function", "function": {"name": "g", "arguments": {"y": 2}}},
    ],
}
VALUES: tuple[Any, ...] = (
    None, False, True, 0, 1, -1.5, 8.5e263, "", "other", "text", "function", [], [1], [[]],
    {}, {"a": 1}, [{}], {"type": "text"}, {"text": 1}, {"function": {"name": "f"}},
)  # fmt: skip
MISSING = object()


def places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    if path:
        yield path
    if isinstance(value, list):
        value = dict(enumerate(value))
    for key, item in value.items() if isinstance(value, dict) else ():
        yield from places(item, (*path, key))


def changed(path: tuple, value: Any) -> dict[str, Any]:
    message = copy.deepcopy(MESSAGE)
    holder: Any = message
    for key in path[:-1]:
        holder = holder[key]
    if value is MISSING:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    return message


def is_read(message: dict[str, Any]) -> bool:
    try:
        read_messages([message], None)
    except InputError:
        return False
    return True


# That the text of arguments is JSON, no keyword of a schema requires.
ARGUMENTS = ("tool_calls", 0, "function", "arguments"), ("tool_calls", 1, "function", "arguments")


@pytest.mark.parametrize("path", list(places(MESSAGE)), ids=lambda path: ".".join(map(str, path)))
def test_schema_and_reader_agree(path: tuple) -> None:
    validator = jsonschema_rs.validator_for(MESSAGE_SCHEMA)
    for value in (MISSING, *VALUES):
        if path in ARGUMENTS and isinstance(value, str):
            continue
        message = changed(path, value)
        assert is_read(message) == validator.is_valid(message), message


def test_the_unchanged_message_is_taken() -> None:
    assert is_read(MESSAGE)
