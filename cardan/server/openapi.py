"""The OpenAPI document of one server: its routes, its request bodies, its limits."""

from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from cardan.core.types.engine_info import EngineInfo
from cardan.server.protocol.chat import ChatCompletionRequest
from cardan.server.protocol.completions import CompletionRequest
from cardan.server.protocol.fields import MAX_INT, TOKEN_ID, Body
from cardan.server.protocol.tokens import DetokenizeRequest, TokenizeRequest
from cardan.server.protocol.unsupported import unsupported_properties

Schema = dict[str, Any]

_REF = "#/components/schemas/{model}"
_BODIES: dict[str, type[Body]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
_STREAMING = ("/v1/chat/completions", "/v1/completions")
# pydantic leaves these names where a validator runs before a constraint.
_CONSTRAINTS = {
    "ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum",
}  # fmt: skip
_SCORES = ("logprobs", "top_logprobs", "prompt_logprobs")
_ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "code": {"type": "integer"},
            },
        }
    },
}
_ANY_ERROR = {
    "description": "What was wrong, or why this server cannot serve now",
    "content": {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}},
}


def openapi_document(app: FastAPI, info: EngineInfo, model_names: Sequence[str]) -> Schema:
    """The document that ``/openapi.json`` serves.

    Relations between fields, and what depends on a prompt's length, it does not say.
    """
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    keys, definitions = models_json_schema(
        [(model, "validation") for model in _BODIES.values()], ref_template=_REF
    )
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    bodies = definitions.get("$defs", {})
    for schema in bodies.values():
        if schema.get("type") == "object":
            _name_constraints(schema)
            _name_limits(schema, info, model_names)
            _allow_nulls(schema)
    for model in _BODIES.values():
        _name_unsupported(bodies[model.__name__])
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)  # FastAPI's own form of an error, which is not ours
    schemas.update(bodies, Error=_ERROR)
    for path, operations in document["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            operation["responses"]["default"] = _ANY_ERROR
            if path in _STREAMING:
                kinds = ("application/json", "text/event-stream")
                operation["responses"]["200"]["content"] = {kind: {} for kind in kinds}
    for path, model in _BODIES.items():
        schema = keys[(model, "validation")]
        document["paths"][path]["post"]["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    return document


def _name_constraints(schema: Schema) -> None:
    for item in list(_walk(schema)):
        for ours, name in _CONSTRAINTS.items():
            if ours in item:
                item[name] = item.pop(ours)
        if item.get("type") == "integer":
            item.setdefault("minimum", -MAX_INT - 1)
            item.setdefault("maximum", MAX_INT)


def _name_limits(schema: Schema, info: EngineInfo, model_names: Sequence[str]) -> None:
    properties = schema["properties"]
    if "model" in properties:
        properties["model"] = {"enum": list(model_names), "title": "Model"}
    for item in _walk(properties):
        if item.get("title") == TOKEN_ID:
            item["maximum"] = info.vocab_size - 1
    for name in _SCORES:
        for item in _walk(properties.get(name, {})):
            if item.get("type") == "integer" and info.max_logprobs != -1:
                item.update(minimum=0, maximum=info.max_logprobs)


def _allow_nulls(schema: Schema) -> None:
    """A member that may be absent may be null, which is the same."""
    required = schema.get("required", ())
    for name, item in schema["properties"].items():
        if name not in required:
            schema["properties"][name] = {"anyOf": [item, {"type": "null"}]}


def _name_unsupported(schema: Schema) -> None:
    """Names that a body may hold, but that may ask for nothing."""
    for name, item in unsupported_properties().items():
        schema["properties"].setdefault(name, item)
    schema["patternProperties"] = {"^guided_": {"type": "null"}}


def _walk(value: Any) -> Iterator[Schema]:
    """All objects in a schema."""
    if isinstance(value, dict):
        yield value
        for item in value.values():
            yield from _walk(item)
    elif isinstance(value, list):
        for item in value:
            yield from _walk(item)
