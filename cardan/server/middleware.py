"""What happens around every request: id, access, drain, last-resort errors, counting."""

import hmac
import logging
import uuid
from collections.abc import Iterable, Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cardan.server.errors import ApiError, ClientGoneError, to_api_error, unavailable
from cardan.server.metrics import ServerMetrics
from cardan.server.protocol.fields import REQUEST_ID
from cardan.server.tracker import RequestTracker

logger = logging.getLogger(__name__)

# Probes and scrapers come without a key, and are answered until the very end.
PUBLIC_PATHS = frozenset({"/health", "/ready", "/ping", "/version", "/metrics"})
# The page itself holds nothing; it asks for the key, and its data need one.
_PAGE_PATH, _PAGE_PREFIX = "/", "/static/"
REQUEST_ID_HEADER = "x-request-id"
_CLIENT_GONE = 499
_HTTP_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class EdgeMiddleware:
    """Gives each request its id, turns it away while draining, and counts its answer.

    The id is the client's ``X-Request-Id`` where that is usable, and goes back in that header; it
    is in ``scope["state"]["request_id"]``, where a route may put another one.

    Behind a proxy under ``root_path`` it does not matter whether the proxy takes the prefix off.
    A request that a proxy may have read otherwise than this server (smuggling) is refused.
    """

    def __init__(
        self, app: ASGIApp, tracker: RequestTracker, metrics: ServerMetrics, root_path: str = ""
    ) -> None:
        self._app = app
        self._root_path = root_path.rstrip("/")
        self._tracker = tracker
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        self._place(scope)
        state = scope.setdefault("state", {})
        state["request_id"] = _request_id(scope)
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = state["request_id"]
            await send(message)

        try:
            refusal = self._refusal(scope)
            if refusal is not None:
                refusal.headers["Connection"] = "close"
                await refusal.response()(scope, receive, send_with_id)
            elif self._root_path and scope["path"] == self._root_path:
                # What the page refers to is in this folder, not beside it.
                await RedirectResponse(f"{self._root_path}/")(scope, receive, send_with_id)
            else:
                await self._app(scope, receive, send_with_id)
        except ClientGoneError:
            status = _CLIENT_GONE
        except Exception as error:
            if status:
                raise  # half an answer is out; the connection has to break
            api_error = to_api_error(error, state["request_id"])
            await api_error.response()(scope, receive, send_with_id)
        finally:
            self._count(scope, status or _CLIENT_GONE)

    def _refusal(self, scope: Scope) -> ApiError | None:
        if scope["http_version"] not in ("1.0", "1.1"):
            return ApiError(400, "this server speaks HTTP/1.1")
        headers = Headers(scope=scope)
        if "transfer-encoding" in headers and "content-length" in headers:
            return ApiError(400, "send either Transfer-Encoding or Content-Length, not both")
        if self._tracker.is_draining and _path(scope) not in PUBLIC_PATHS:
            return unavailable("this server is shutting down; send the request elsewhere")
        return None

    def _place(self, scope: Scope) -> None:
        """Set ``root_path``, and ``path`` with it in front, as ASGI has them."""
        scheme, mark, rest = scope["path"].partition("://")
        if mark and "/" not in scheme:  # a whole URL, as proxies are asked
            scope["path"] = "/" + rest.partition("/")[2]
        root = self._root_path
        if root:
            scope["root_path"] = root
            if scope["path"] != root and not scope["path"].startswith(f"{root}/"):
                scope["path"] = root + scope["path"]

    def _count(self, scope: Scope, status: int) -> None:
        route = getattr(scope.get("route"), "path", "none")
        method = scope["method"] if scope["method"] in _HTTP_METHODS else "other"
        self._metrics.count_http(method, route, status)


class AuthMiddleware:
    """Asks for one of the bearer keys on every path that is not public."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str]) -> None:
        self._app = app
        self._api_keys = tuple(key.encode() for key in api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["type"] != "http" or _is_open(_path(scope))
        if is_open or self._accepts(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "a valid API key is needed: send the header Authorization: Bearer KEY",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await error.response()(scope, receive, send)

    def _accepts(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip().encode("latin-1")  # the bytes as they came
        return scheme.lower() == "bearer" and _matches_any(given, self._api_keys)


def _matches_any(given: bytes, keys: Iterable[bytes]) -> bool:
    """Takes the same time wherever the difference is and whichever key matches."""
    matches = [hmac.compare_digest(given, key) for key in keys]
    return any(matches)


def _is_open(path: str) -> bool:
    return path in PUBLIC_PATHS or path == _PAGE_PATH or path.startswith(_PAGE_PREFIX)


def _request_id(scope: Scope) -> str:
    given = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
    return given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _path(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))
