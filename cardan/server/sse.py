"""Server-sent events over ASGI."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractContextManager, aclosing
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cardan.server.errors import ClientGoneError, to_api_error
from cardan.server.tracker import ActiveRequest

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
KEEP_ALIVE_SECONDS = 15.0
_HEADERS = {
    "content-type": "text/event-stream",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # proxies would hold events back
}


def event(content: object) -> bytes:
    """One event: strict JSON holds no line break, so one data line is enough."""
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


class EventStream(Response):
    """Sends events as they come and ``[DONE]`` last, always.

    Nothing is sent before the first event is there, so a failure until then is an HTTP error;
    a later one is the last event before ``[DONE]``. The events' generator is closed when the
    client leaves.
    """

    def __init__(
        self,
        make_events: Callable[[str], AsyncGenerator[bytes, None]],
        active: AbstractContextManager[ActiveRequest],
        headers: Mapping[str, str],
        keep_alive: float = KEEP_ALIVE_SECONDS,
    ) -> None:
        """``make_events`` gets the request's engine id; ``active`` is entered while sending.

        ``keep_alive``: a comment goes out after about as many seconds without an event.
        """
        self.status_code = 200
        self.background = None
        self.init_headers({**_HEADERS, **headers})
        self._make_events = make_events
        self._active = active
        self._keep_alive = keep_alive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream = _Stream(send, self.raw_headers)
        with self._active as active:
            try:
                await active.run(self._send_all(stream, active.engine_id), receive)
            except ClientGoneError:
                return
            except Exception as error:
                if not stream.has_started:
                    raise
                body = to_api_error(error, active.engine_id).body()
                await stream.send(event(body) + DONE)
            await stream.end()

    async def _send_all(self, stream: "_Stream", engine_id: str) -> None:
        pulse = asyncio.create_task(stream.keep_alive(self._keep_alive))
        try:
            async with aclosing(self._make_events(engine_id)) as events:
                async for data in events:
                    await stream.send(data)
            await stream.send(DONE)
        finally:
            pulse.cancel()


class _Stream:
    """The response on the wire."""

    def __init__(self, send: Send, raw_headers: list[tuple[bytes, bytes]]) -> None:
        self._send = send
        self._raw_headers = raw_headers
        self._is_quiet = False
        self.has_started = False

    async def send(self, data: bytes) -> None:
        self._is_quiet = False
        if not self.has_started:
            self.has_started = True
            start: dict[str, Any] = {"type": "http.response.start", "status": 200}
            await self._send({**start, "headers": self._raw_headers})
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def keep_alive(self, interval: float) -> None:
        """Comments while a started stream is quiet; runs until cancelled."""
        while True:
            self._is_quiet = True
            await asyncio.sleep(interval)
            if self._is_quiet and self.has_started:
                await self.send(KEEP_ALIVE)
