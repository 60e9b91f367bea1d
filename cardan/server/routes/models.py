"""Which models there are."""

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from cardan.server.context import ServerContext
from cardan.server.errors import JsonResponse


def models_router(context: ServerContext) -> APIRouter:
    """``/v1/models`` and one model by its name."""
    router = APIRouter(tags=["models"])

    def card(name: str) -> dict[str, Any]:
        info = context.engine.info
        return {
            "id": name,
            "object": "model",
            "created": context.created,
            "owned_by": "cardan",
            "root": info.model,
            "parent": None,
            "max_model_len": info.max_model_len,
            "permission": [],
        }

    async def list_models() -> Response:
        """Every name that a request may give as its model."""
        return JsonResponse(
            {"object": "list", "data": [card(name) for name in context.model_names]}
        )

    async def show_model(name: str) -> Response:
        """One model."""
        context.check_model(name)
        return JsonResponse(card(name))

    for path, endpoint in (("/v1/models", list_models), ("/v1/models/{name:path}", show_model)):
        router.add_api_route(path, endpoint, response_class=Response)
        router.add_api_route(path, endpoint, methods=["HEAD"], include_in_schema=False)
    return router
