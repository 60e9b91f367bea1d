"""The fields of a chat completion that are about tools."""

import re
from typing import Annotated, Any

from pydantic import AfterValidator, Field

MAX_TOOLS = 1024
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_NAME_SCHEMA = {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,64}$"}
_FUNCTION_SCHEMA = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": _NAME_SCHEMA,
        "description": {"type": "string"},
        "parameters": {"type": "object"},
    },
}
_TOOL_SCHEMA = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {"type": {"const": "function"}, "function": _FUNCTION_SCHEMA},
}
_NAMED_SCHEMA = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {"name": _NAME_SCHEMA},
        },
    },
}


def _check_function(item: Any, where: str) -> dict[str, Any]:
    """The function of a tool or a choice; its name is checked."""
    if not isinstance(item, dict) or item.get("type") != "function":
        raise ValueError(f"{where} must be an object of type 'function'")
    function = item.get("function")
    if not isinstance(function, dict):
        raise ValueError(f"{where} must have an object as its function")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            f"{where}.function.name must have 1 to 64 letters, digits, '_', '-' and '.'"
        )
    return function


def _checked_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    names = set()
    for index, tool in enumerate(tools):
        function = _check_function(tool, f"tool {index}")
        if not isinstance(function.get("description", ""), str):
            raise ValueError(f"tool {index}: its description must be a string")
        if not isinstance(function.get("parameters", {}), dict):
            raise ValueError(f"tool {index}: its parameters must be a JSON schema, an object")
        if function["name"] in names:
            raise ValueError(f"tool {index}: the name {function['name']} is there twice")
        names.add(function["name"])
    return tools


def _checked_choice(choice: Any) -> Any:
    if isinstance(choice, str):
        if choice not in ("none", "auto", "required"):
            raise ValueError("must be 'none', 'auto', 'required' or a function of the tools")
        return choice
    _check_function(choice, "it")
    return choice


Tools = Annotated[
    list[dict[str, Any]],
    Field(min_length=1, max_length=MAX_TOOLS, json_schema_extra={"items": _TOOL_SCHEMA}),
    AfterValidator(_checked_tools),
]
ToolChoice = Annotated[
    Any,
    AfterValidator(_checked_choice),
    Field(json_schema_extra={"anyOf": [{"enum": ["none", "auto", "required"]}, _NAMED_SCHEMA]}),
]
