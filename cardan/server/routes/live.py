"""Live numbers as a stream of events."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import APIRouter
from starlette.responses import StreamingResponse
from starlette.types import Send

from cardan.server.context import ServerContext
from cardan.server.live import LiveInfo, LiveSample, LiveSampler, live_info

_HEADERS = {
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # proxies would hold events back
}


class _EventResponse(StreamingResponse):
    """Closes its events' generator however the sending ends."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(events, headers=_HEADERS)
        self._events = events

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self._events):
            await super().stream_response(send)


def live_router(context: ServerContext) -> APIRouter:
    """``/cardan/live``."""
    router = APIRouter(tags=["page"])
    sampler = LiveSampler(context)

    async def events() -> AsyncGenerator[bytes, None]:
        yield _event("info", live_info(context))
        async with aclosing(sampler.watch()) as samples:
            async for sample in samples:
                yield _event("sample", sample)

    @router.get(
        "/cardan/live",
        response_class=_EventResponse,
        status_code=200,
        responses={200: {"model": LiveSample, "description": "Events: info once, then samples"}},
    )
    async def live() -> _EventResponse:
        """Server-sent events without end: ``info`` once, then a ``sample`` twice a second."""
        return _EventResponse(events())

    return router


def _event(name: str, content: LiveInfo | LiveSample) -> bytes:
    return f"event: {name}\ndata: {content.model_dump_json()}\n\n".encode()
