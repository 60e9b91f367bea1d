"""What the OpenAPI document says of a chat message; `cardan.server.messages` reads them."""

from typing import Any

_TEXT = {"type": "string"}
_PART = {
    "anyOf": [
        _TEXT,
        {
            "type": "object",
            "required": ["text"],
            "properties": {
                "type": {"enum": ["text", "input_text", "output_text"]},
                "text": _TEXT,
            },
        },
        {
            "type": "object",
            "required": ["type", "refusal"],
            "properties": {"type": {"const": "refusal"}, "refusal": _TEXT},
        },
        {
            "type": "object",
            "required": ["type", "thinking"],
            "properties": {"type": {"const": "thinking"}, "thinking": _TEXT},
        },
    ]
}
_TOOL_CALL = {
    "type": "object",
    "required": ["function"],
    "properties": {
        "id": _TEXT,
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": _TEXT,
                "arguments": {
                    "anyOf": [
                        {"type": "object"},
                        {"type": "string", "contentMediaType": "application/json"},
                        {"type": "null"},
                    ]
                },
            },
        },
    },
}
_MAYBE_TEXT = {"anyOf": [_TEXT, {"type": "null"}]}

MESSAGE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["role"],
    "properties": {
        # A chat template may know more roles than these.
        "role": {"enum": ["system", "developer", "user", "assistant", "tool", "function"]},
        "content": {"anyOf": [_TEXT, {"type": "array", "items": _PART}, {"type": "null"}]},
        "reasoning": _MAYBE_TEXT,
        "reasoning_content": _MAYBE_TEXT,
        "tool_calls": {"anyOf": [{"type": "array", "items": _TOOL_CALL}, {"type": "null"}]},
    },
}
