"""Which requests are in flight, whether new ones are let in, and how they are cut short."""

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from starlette.types import Receive

from cardan.server.errors import ApiError, ClientGoneError, unavailable

T = TypeVar("T")


class ActiveRequest:
    """One generating request. ``engine_id`` is unique among those in flight."""

    def __init__(self, engine_id: str) -> None:
        self.engine_id = engine_id
        self._task: asyncio.Task[Any] | None = None
        self._error: ApiError | None = None

    def abort(self, error: ApiError) -> None:
        """Cancel the work; whoever waits for it gets ``error``."""
        if self._error is None:
            self._error = error
            if self._task is not None:
                self._task.cancel()

    async def run(self, work: Coroutine[Any, Any, T], receive: Receive) -> T:
        """Result of ``work``, which is cancelled when the client leaves or on `abort`.

        ``receive`` must have delivered the whole body before.

        Raises:
            ClientGoneError: the client left first.
            ApiError: `abort` was called.
        """
        if self._error is not None:
            work.close()
            raise self._error
        task = asyncio.create_task(work)
        self._task = task
        watcher = asyncio.create_task(_wait_for_disconnect(receive))
        try:
            await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientGoneError
            if task.cancelled() and self._error is not None:
                raise self._error
            return task.result()
        finally:
            watcher.cancel()
            task.cancel()
            await asyncio.gather(task, watcher, return_exceptions=True)


class RequestTracker:
    """All requests in flight. Owned by the event loop's thread."""

    def __init__(self) -> None:
        self._active: dict[str, ActiveRequest] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = asyncio.Event()
        self._serial = 0

    @property
    def num_active(self) -> int:
        return len(self._active)

    @property
    def is_draining(self) -> bool:
        """Whether new requests are turned away because the server is about to stop."""
        return self._draining.is_set()

    @contextmanager
    def track(self, request_id: str) -> Iterator[ActiveRequest]:
        """Count a request as in flight. Ids that clients chose may repeat; the engine's may not."""
        engine_id = request_id
        if engine_id in self._active:
            self._serial += 1
            engine_id = f"{request_id} #{self._serial}"  # no client can send a space in it
        request = self._active[engine_id] = ActiveRequest(engine_id)
        self._idle.clear()
        try:
            yield request
        finally:
            del self._active[engine_id]
            if not self._active:
                self._idle.set()

    def start_draining(self) -> None:
        self._draining.set()

    async def wait_draining(self, timeout: float) -> bool:
        """Whether the server is stopping; waits up to ``timeout`` seconds for it to begin."""
        return await _happens(self._draining, timeout)

    async def wait_idle(self, timeout: float) -> bool:
        """Whether all requests ended within ``timeout`` seconds."""
        return await _happens(self._idle, timeout)

    def abort_all(self, message: str) -> None:
        """End every request with a 503 error that says ``message``."""
        for request in list(self._active.values()):
            request.abort(unavailable(message))


async def _happens(event: asyncio.Event, timeout: float) -> bool:
    try:
        async with asyncio.timeout(timeout):
            await event.wait()
    except TimeoutError:
        return False
    return True


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
