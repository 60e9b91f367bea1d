"""Puts the HTTP application together."""

from functools import cache
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from cardan.core.config.server import ServerConfig
from cardan.core.discovery import Discovery
from cardan.core.engine.serving import ServingEngine
from cardan.core.types.errors import CardanError
from cardan.server.context import VERSION, ServerContext
from cardan.server.errors import ApiError, to_api_error
from cardan.server.metrics import ServerMetrics
from cardan.server.middleware import AuthMiddleware, EdgeMiddleware
from cardan.server.openapi import openapi_document
from cardan.server.respond import IGNORED_HEADER
from cardan.server.routes.completions import completions_router
from cardan.server.routes.health import health_router
from cardan.server.routes.live import live_router
from cardan.server.routes.models import models_router
from cardan.server.routes.page import page_router
from cardan.server.routes.sleep import sleep_router
from cardan.server.routes.tokens import tokens_router
from cardan.server.routes.traces import traces_router
from cardan.server.tool_format import ToolFormat, find_tool_format
from cardan.server.tracker import RequestTracker


def create_app(engine: ServingEngine, config: ServerConfig, metrics: ServerMetrics) -> FastAPI:
    """The application in front of ``engine``; its `RequestTracker` is ``app.state.tracker``."""
    tracker = RequestTracker()
    context = ServerContext(
        engine=engine,
        config=config,
        metrics=metrics,
        tracker=tracker,
        tool_format=_tool_format(engine, config),
    )
    # A redirect would lead to wherever the client's Host header says.
    app = FastAPI(title="cardan", version=VERSION, redoc_url=None, redirect_slashes=False)
    app.state.tracker = tracker
    routers = [completions_router, models_router, tokens_router, health_router]
    if config.enable_page:
        routers += [page_router, live_router, traces_router]
    if config.enable_sleep_mode:
        routers.append(sleep_router)
    for make_router in routers:
        app.include_router(make_router(context))
    for kind in (ApiError, CardanError, ValidationError, RequestValidationError):
        app.add_exception_handler(kind, _answer_error)
    app.add_exception_handler(HTTPException, _answer_http_exception)

    @cache
    def openapi() -> dict[str, Any]:
        return openapi_document(app, engine.info, context.model_names)

    app.openapi = openapi  # type: ignore[method-assign]
    _add_middleware(app, config, metrics, tracker)
    return app


def _tool_format(engine: ServingEngine, config: ServerConfig) -> ToolFormat | None:
    templates = engine.tokenizer.chat_templates
    template = templates.get("tool_use", engine.tokenizer.chat_template)
    return find_tool_format(config.tool_call_parser, template, Discovery())


def _add_middleware(
    app: FastAPI, config: ServerConfig, metrics: ServerMetrics, tracker: RequestTracker
) -> None:
    """Innermost first."""
    if config.api_keys:
        app.add_middleware(AuthMiddleware, api_keys=config.api_keys)
    app.add_middleware(EdgeMiddleware, tracker=tracker, metrics=metrics, root_path=config.root_path)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", IGNORED_HEADER, "Retry-After"],
        )


async def _answer_error(request: Request, error: Exception) -> Response:
    return to_api_error(error, request.state.request_id).response()


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # registered for this class only
    path = request.url.path
    if error.status_code == 404:
        message = f"there is nothing at {request.method} {path[:100]}; see /docs"
    elif error.status_code == 405:
        message = f"{request.method} is not allowed at {path[:100]}"
    else:
        message = str(error.detail)
    return ApiError(error.status_code, message, headers=error.headers).response()
