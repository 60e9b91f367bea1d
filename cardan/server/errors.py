"""Every failure as the one JSON shape that OpenAI clients read.

Messages never hold a traceback, a class name or a path of the server.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.responses import Response

from cardan.core.interfaces.errors import UnsupportedError
from cardan.core.types.errors import (
    EngineAsleepError,
    EngineDeadError,
    InputError,
    NotFoundError,
    QueueFullError,
    RequestFailedError,
)

logger = logging.getLogger(__name__)

RETRY_AFTER_SECONDS = 1
MAX_PROBLEMS = 10
_MAX_VALUE_CHARS = 60
_MAX_MESSAGE_CHARS = 4000

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}


class ClientGoneError(Exception):
    """The client closed its connection; nobody reads an answer."""


class ApiError(Exception):
    """A failure in its HTTP form."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        fallback = "BadRequestError" if self.status < 500 else "InternalServerError"
        return {
            "error": {
                "message": clip(self.message, _MAX_MESSAGE_CHARS),
                "type": _TYPES.get(self.status, fallback),
                "param": self.param,
                "code": self.status,
            }
        }

    def response(self) -> Response:
        return JsonResponse(self.body(), self.status, self.headers)


class JsonResponse(Response):
    """Strict JSON: text is UTF-8, and no NaN or infinity can be written."""

    media_type = "application/json"

    def __init__(
        self, content: object, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(msgspec.json.encode(content), status, headers)


def to_api_error(error: Exception, request_id: str | None = None) -> ApiError:
    """The HTTP form of any exception; what nobody expected is logged and told as 500."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, NotFoundError):
        return ApiError(404, str(error), error.field)
    if isinstance(error, InputError):
        return ApiError(400, str(error), error.field)
    if isinstance(error, ValidationError):
        return _schema_error(error.errors(include_url=False, include_context=False))
    if isinstance(error, RequestValidationError):
        # The first part of a place says that it is in the query.
        return _schema_error([{**item, "loc": item["loc"][1:]} for item in error.errors()])
    if isinstance(error, UnsupportedError):
        return ApiError(501, str(error))
    if isinstance(error, QueueFullError | EngineDeadError | EngineAsleepError):
        return unavailable(str(error))
    if isinstance(error, RequestFailedError):
        return ApiError(500, str(error))
    logger.error("request failed unexpectedly", exc_info=error, extra={"request_id": request_id})
    return ApiError(500, "internal error; the server's log has the details")


def unavailable(message: str) -> ApiError:
    """503: trying again later may help."""
    return ApiError(503, message, headers={"Retry-After": str(RETRY_AFTER_SECONDS)})


def clip(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _schema_error(problems: Sequence[Mapping[str, Any]]) -> ApiError:
    """At most `MAX_PROBLEMS` problems as ``field: what is wrong (got value)``."""
    shown = [_problem(item["loc"], item["msg"], item["input"]) for item in problems[:MAX_PROBLEMS]]
    if len(problems) > MAX_PROBLEMS:
        shown.append(f"and {len(problems) - MAX_PROBLEMS} more")
    return ApiError(400, "; ".join(shown), _path(problems[0]["loc"]) or None)


def _problem(location: Sequence[int | str], message: str, value: object) -> str:
    path = _path(location)
    message = message.removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    if message == "field required":
        return f"{path}: is required"
    if isinstance(value, Mapping | list):
        return f"{path}: {message}"
    shown = clip(msgspec.json.encode(value).decode(), _MAX_VALUE_CHARS)
    return f"{path}: {message} (got {shown})"


def _path(location: Sequence[int | str]) -> str:
    """``messages[2].role``; names that a client made up are clipped."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f"{'.' if path else ''}{clip(part, _MAX_VALUE_CHARS)}"
    return path
