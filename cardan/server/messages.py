"""Chat messages from the wire to plain mappings that a chat template reads."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from cardan.core.types.errors import InputError
from cardan.server.errors import clip

_ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_MEDIA_PARTS = (
    "image_url", "input_image", "image_embeds", "input_audio", "audio_url", "audio_embeds",
    "video_url", "file", "input_file",
)  # fmt: skip


def read_messages(
    messages: Sequence[Mapping[str, Any]], template: str | None
) -> list[dict[str, Any]]:
    """Messages in the one form that templates know.

    Content becomes text (text parts joined by line breaks), the JSON arguments of tool calls
    become objects, and ``developer`` becomes ``system`` for a ``template`` that does not know it.
    Other members stay as they are.

    Raises:
        InputError: a role, a content part or a tool call is unusable.
    """
    return [
        _read_message(message, f"messages[{index}]", template or "")
        for index, message in enumerate(messages)
    ]


def _read_message(message: Mapping[str, Any], where: str, template: str) -> dict[str, Any]:
    read = {key: value for key, value in message.items() if value is not None}
    read["role"] = _read_role(message.get("role"), where, template)
    read["content"], thoughts = _read_content(message.get("content"), f"{where}.content")
    for name in ("reasoning", "reasoning_content"):
        if not isinstance(read.get(name, ""), str):
            raise InputError(f"{where}.{name} must be a string", f"{where}.{name}")
    if thoughts:
        read.setdefault("reasoning", thoughts)
    refusal = read.pop("refusal", None)
    if isinstance(refusal, str) and not read["content"]:
        read["content"] = refusal
    calls = _read_tool_calls(read.pop("tool_calls", []), f"{where}.tool_calls")
    if calls:
        read["tool_calls"] = calls
    return read


def _read_role(role: object, where: str, template: str) -> str:
    if not isinstance(role, str) or not role:
        raise InputError(f"{where}.role is required: one of {', '.join(_ROLES)}", f"{where}.role")
    if role == "function":
        return "tool"
    if role == "developer" and "developer" not in template:
        return "system"
    named = any(quote + role + quote in template for quote in "'\"")
    if role not in _ROLES and not named:
        raise InputError(
            f"{where}.role {clip(role, 40)!r} is none of {', '.join(_ROLES)}, "
            "and the model's chat template does not name it",
            f"{where}.role",
        )
    return role


def _read_content(content: object, where: str) -> tuple[str, str]:
    """The text of a content and the thoughts among its parts."""
    if content is None:
        return "", ""
    if isinstance(content, str):
        return content, ""
    if not isinstance(content, list):
        raise InputError(f"{where} must be a string, null or a list of parts", where)
    texts: list[str] = []
    thoughts: list[str] = []
    for index, part in enumerate(content):
        kind, text = _read_part(part, f"{where}[{index}]")
        (thoughts if kind == "thinking" else texts).append(text)
    return "\n".join(texts), "\n".join(thoughts)


def _read_part(part: object, where: str) -> tuple[str, str]:
    if isinstance(part, str):
        return "text", part
    if not isinstance(part, Mapping):
        raise InputError(f"{where} must be an object with a type, or a string", where)
    kind = part.get("type", "text")
    if kind in _MEDIA_PARTS:
        raise InputError(f"{where}: parts of type {kind} are not supported yet; send text", where)
    member = "thinking" if kind == "thinking" else _TEXT_PARTS.get(str(kind))
    if member is None:
        raise InputError(f"{where}: the part type {clip(str(kind), 40)!r} is unknown", where)
    text = part.get(member)
    if not isinstance(text, str):
        raise InputError(f"{where}.{member} must be a string", f"{where}.{member}")
    return str(kind), text


def _read_tool_calls(calls: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise InputError(f"{where} must be a list", where)
    return [_read_tool_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _read_tool_call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise InputError(f"{where} must be an object with a function", where)
    if not isinstance(function.get("name"), str):
        raise InputError(f"{where}.function.name must be a string", f"{where}.function.name")
    if call.get("type", "function") != "function":
        raise InputError(f"{where}.type must be 'function'", f"{where}.type")
    if not isinstance(call.get("id", ""), str):
        raise InputError(f"{where}.id must be a string", f"{where}.id")
    arguments = _read_arguments(function.get("arguments"), f"{where}.function.arguments")
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _read_arguments(arguments: object, where: str) -> dict[str, Any]:
    """The JSON text of a call's arguments as an object; an object is taken as it is."""
    value = arguments
    if isinstance(value, str):
        try:
            value = from_json(value, allow_inf_nan=False) if value.strip() else {}
        except ValueError as error:
            raise InputError(f"{where} is not valid JSON: {error}", where) from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InputError(f"{where} must be a JSON object", where)
    return value
