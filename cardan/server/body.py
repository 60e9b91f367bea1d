"""Reads a request body: within the size cap, as JSON, into its checked form."""

import functools
from typing import Any, TypeVar

from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from cardan.server.errors import ApiError, ClientGoneError
from cardan.server.protocol.fields import Body, without_nulls
from cardan.server.protocol.unsupported import drop_unsupported

BodyT = TypeVar("BodyT", bound=Body)


async def parse_body(request: Request, model: type[BodyT], max_bytes: int) -> BodyT:
    """The checked body of a request.

    Nesting deeper than 200 levels is refused by the JSON reader.

    Raises:
        ApiError: too large (413), no JSON content type (415), malformed JSON (400).
        InputError, ValidationError: a field is unusable (400).
        ClientGoneError: the client left while sending.
    """
    _check_content_type(request)
    fields = _parse(await _read(request, max_bytes))
    kept = drop_unsupported(without_nulls(fields), _names(model))
    return model.model_validate(kept)


@functools.cache
def _names(model: type[Body]) -> frozenset[str]:
    return frozenset(model.model_fields)


def _check_content_type(request: Request) -> None:
    header = request.headers.get("content-type", "")
    essence = header.split(";", 1)[0].strip().lower()
    if essence != "application/json" and not essence.endswith("+json"):
        raise ApiError(415, "the Content-Type header must be application/json")


async def _read(request: Request, max_bytes: int) -> bytes:
    message = f"the request body is larger than {max_bytes} bytes, this server's limit"
    too_large = ApiError(413, message)
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise too_large
    data = bytearray()
    try:
        async for chunk in request.stream():
            data += chunk
            if len(data) > max_bytes:
                raise too_large
    except ClientDisconnect:
        raise ClientGoneError from None
    return bytes(data)


def _parse(data: bytes) -> dict[str, Any]:
    try:
        value = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the request body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the request body must be a JSON object")
    return value
