"""Field types that the request bodies share.

JSON is taken at its word: no text counts as a number and no number as a boolean.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

_SALT = re.compile(r"[^@/\\\0]{1,128}")
_HEADER_UNSAFE = re.compile(r"[^A-Za-z0-9_.\-]")
MAX_INT = 2**63 - 1
# Limits of what a request may hand to plugins.
MAX_EXTRA_ARGS = 64
MAX_EXTRA_NAME = 128
MAX_EXTRA_ITEMS = 1024
MAX_EXTRA_TEXT = 4096
_EXTRA_SCALARS = [
    {"type": "boolean"},
    {"type": "number"},
    {"type": "string", "maxLength": MAX_EXTRA_TEXT},
]
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def whole(value: object) -> object:
    """JSON has one kind of number, so 5.0 is an integer; arrays hold no larger ones than int64."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and not -MAX_INT - 1 <= value <= MAX_INT:
        raise ValueError("must be between -2**63 and 2**63 - 1")
    return value


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _checked_salt(value: str) -> str:
    if not _SALT.fullmatch(value):
        raise ValueError("must have 1 to 128 characters and none of @ / \\ and NUL")
    return value


def _checked_request_id(value: str) -> str:
    if not REQUEST_ID.fullmatch(value):
        raise ValueError("must have 1 to 128 visible ASCII characters")
    return value


def _checked_extra_args(value: dict[str, Any]) -> dict[str, Any]:
    if len(value) > MAX_EXTRA_ARGS:
        raise ValueError(f"must have at most {MAX_EXTRA_ARGS} members")
    for name, item in value.items():
        if not 1 <= len(name) <= MAX_EXTRA_NAME:
            raise ValueError(f"names must have 1 to {MAX_EXTRA_NAME} characters")
        items = item if isinstance(item, list) else [item]
        if len(items) > MAX_EXTRA_ITEMS:
            raise ValueError(f"{name!r} must have at most {MAX_EXTRA_ITEMS} items")
        for one in items:
            if not isinstance(one, bool | int | float | str):
                raise ValueError(
                    f"{name!r} must be a number, a string, a boolean or a list of them"
                )
            if isinstance(one, str) and len(one) > MAX_EXTRA_TEXT:
                raise ValueError(f"{name!r} must have at most {MAX_EXTRA_TEXT} characters")
            whole(one)
    return value


def without_nulls(value: Any) -> Any:
    """An object without its null members: null is the same as absent."""
    if isinstance(value, Mapping):
        return {key: item for key, item in value.items() if item is not None}
    return value


def header_safe(name: str) -> str:
    """A name that a client made up, fit for an HTTP header."""
    return _HEADER_UNSAFE.sub("?", name[:64])


Int = Annotated[int, BeforeValidator(whole)]
Float = Annotated[float, Field(allow_inf_nan=False)]
# The title by which the OpenAPI document finds token ids, to add the vocabulary's size.
TOKEN_ID = "Token id"
TokenIds = list[Annotated[Int, Field(ge=0, lt=2**31, title=TOKEN_ID)]]
Text = Annotated[str, Field(json_schema_extra={"minLength": 1})]
# A token id as the name of a JSON member; `cardan.server.sampling` reads it.
TokenIdText = Annotated[str, Field(json_schema_extra={"pattern": "^[0-9]{1,10}$"})]
StringList = Annotated[
    list[str], BeforeValidator(_listed, json_schema_input_type=Text | list[Text])
]
CacheSalt = Annotated[
    str,
    AfterValidator(_checked_salt),
    Field(json_schema_extra={"pattern": r"^[^@/\\\u0000]{1,128}$"}),
]
RequestId = Annotated[
    str,
    AfterValidator(_checked_request_id),
    Field(json_schema_extra={"pattern": "^[!-~]{1,128}$"}),
]

ExtraArgs = Annotated[
    dict[str, Any],
    AfterValidator(_checked_extra_args),
    Field(
        json_schema_extra={
            "maxProperties": MAX_EXTRA_ARGS,
            "propertyNames": {"minLength": 1, "maxLength": MAX_EXTRA_NAME},
            "additionalProperties": {
                "anyOf": [*_EXTRA_SCALARS, {"type": "array", "items": {"anyOf": _EXTRA_SCALARS}}]
            },
        }
    ),
]


class Body(BaseModel):
    """A JSON object whose unknown members are kept aside in ``model_extra``."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())


class StreamOptions(Body):
    """``continuous_usage_stats`` puts the running usage on every event."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
