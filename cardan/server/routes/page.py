"""The page at ``/`` and its files, which are part of the package and need no build."""

import hashlib
from dataclasses import dataclass
from importlib.resources import files

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, Response

from cardan.server.context import ServerContext

_INDEX = "index.html"
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_NEEDS_KEY = b'data-needs-key="no"', b'data-needs-key="yes"'
# Nothing from elsewhere, nothing inline, in no frame.
_POLICY = (
    "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'"
)
_HEADERS = {
    # Kept, but asked about each time: a file's address stays the same from version to version.
    "cache-control": "no-cache",
    "content-security-policy": _POLICY,
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    headers: dict[str, str]

    def respond(self, request: Request) -> Response:
        tags = request.headers.get("if-none-match", "")
        if self.headers["etag"] in [tag.strip().removeprefix("W/") for tag in tags.split(",")]:
            headers = {name: self.headers[name] for name in ("etag", *_HEADERS)}
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers=self.headers)


def page_router(context: ServerContext) -> APIRouter:
    """``/`` and ``/static/{name}``."""
    router = APIRouter(tags=["page"])
    static = _load(needs_key=bool(context.config.api_keys))
    index = static.pop(_INDEX)

    async def page(request: Request) -> Response:
        """The page: chat, live view, traces of requests."""
        return index.respond(request)

    async def static_file(request: Request, name: str) -> Response:
        file = static.get(name)
        if file is None:
            raise HTTPException(404)
        return file.respond(request)

    router.add_api_route("/", page, methods=["GET"], response_class=HTMLResponse)
    router.add_api_route("/", page, methods=["HEAD"], include_in_schema=False)
    for method in ("GET", "HEAD"):
        router.add_api_route(
            "/static/{name}", static_file, methods=[method], include_in_schema=False
        )
    return router


def _load(needs_key: bool) -> dict[str, _File]:
    """All files of the page by name; read once, as they are small."""
    loaded = {}
    for entry in files("cardan.server").joinpath("static").iterdir():
        media_type = _TYPES.get(entry.name.rpartition(".")[2])
        if media_type is None:
            continue
        content = entry.read_bytes()
        if entry.name == _INDEX and needs_key:
            content = content.replace(*_NEEDS_KEY)
        etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        headers = {**_HEADERS, "content-type": media_type, "etag": etag}
        loaded[entry.name] = _File(content, headers)
    return loaded
