"""Adds the request bodies, which the routes read themselves, to the OpenAPI document."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from cardan.server.protocol.chat import ChatCompletionRequest
from cardan.server.protocol.completions import CompletionRequest
from cardan.server.protocol.fields import Body
from cardan.server.protocol.tokens import DetokenizeRequest, TokenizeRequest

_REF = "#/components/schemas/{model}"
_BODIES: dict[str, type[Body]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}


def openapi_document(app: FastAPI) -> dict[str, Any]:
    """The document that ``/openapi.json`` serves."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    keys, definitions = models_json_schema(
        [(model, "validation") for model in _BODIES.values()], ref_template=_REF
    )
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas.update(definitions.get("$defs", {}))
    for path, model in _BODIES.items():
        schema = keys[(model, "validation")]
        document["paths"][path]["post"]["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    return document
