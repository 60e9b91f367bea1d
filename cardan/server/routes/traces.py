"""Traces of requests: a list, and one of them whole."""

import time

from fastapi import APIRouter

from cardan.core.types.errors import NotFoundError
from cardan.server.context import ServerContext
from cardan.server.errors import clip
from cardan.server.traces import Trace, TraceList, describe, summarize

_MAX_LISTED = 100


def traces_router(context: ServerContext) -> APIRouter:
    """``/cardan/requests`` and ``/cardan/requests/{id}``."""
    router = APIRouter(tags=["page"])
    engine = context.engine

    @router.get("/cardan/requests")
    async def list_requests() -> TraceList:
        """Live and latest requests, at most 100 of each."""
        now = time.monotonic()
        live, recent = engine.traces.live, engine.traces.recent
        return TraceList(
            num_live=len(live),
            live=[summarize(trace, now) for trace in live[:_MAX_LISTED]],
            recent=[summarize(trace, now) for trace in recent[:_MAX_LISTED]],
        )

    @router.get("/cardan/requests/{request_id:path}")
    async def show_request(request_id: str) -> Trace:
        """One request: its queue, each step's tokens, cache hits, and why it ended."""
        trace = engine.traces.find(request_id)
        if trace is None:
            raise NotFoundError(
                f"there is no trace of request {clip(request_id, 100)!r}; the latest "
                f"{engine.traces.max_recent} requests have one"
            )
        return describe(trace, time.monotonic(), engine.info.max_model_len)

    return router
