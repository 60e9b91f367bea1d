"""Routes for probes, scrapers and people who look after the server."""

from fastapi import APIRouter
from starlette.responses import Response

from cardan.server.context import VERSION, ServerContext
from cardan.server.errors import JsonResponse, unavailable


def health_router(context: ServerContext) -> APIRouter:
    """Liveness, readiness, version, load and metrics."""
    router = APIRouter(tags=["health"])
    engine, tracker = context.engine, context.tracker

    async def health() -> Response:
        """200 while the engine serves, else 503 with the reason."""
        state = engine.health()
        if state.is_serving:
            return Response()
        reason = f": {state.reason}" if state.reason else ""
        return unavailable(f"the engine is {state.state}{reason}").response()

    async def ready() -> Response:
        """Like health, but 503 also while the server drains or sleeps: send no new requests."""
        if tracker.is_draining:
            return unavailable("this server is shutting down").response()
        if engine.sleep_level:
            return unavailable("the engine sleeps; POST /wake_up").response()
        return await health()

    async def show_version() -> Response:
        """Version of cardan."""
        return JsonResponse({"version": VERSION})

    async def load() -> Response:
        """How much is going on."""
        stats = engine.stats()
        return JsonResponse(
            {
                "server_load": tracker.num_active,
                "num_running": stats.num_running,
                "num_waiting": stats.num_waiting,
                "kv_cache_usage": stats.kv_usage,
            }
        )

    async def metrics() -> Response:
        """All metrics in the Prometheus text format."""
        text = context.metrics.render()
        return Response(text, media_type="text/plain; version=1.0.0; charset=utf-8")

    probes = (
        ("/health", health),
        ("/ready", ready),
        ("/ping", health),
        ("/version", show_version),
        ("/load", load),
        ("/metrics", metrics),
    )
    for path, endpoint in probes:
        router.add_api_route(path, endpoint, name=path[1:], response_class=Response)
        router.add_api_route(path, endpoint, methods=["HEAD"], include_in_schema=False)
    router.add_api_route("/ping", health, methods=["POST"], include_in_schema=False)
    return router
