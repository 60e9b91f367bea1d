"""Routes that give the device's memory back and take it again."""

from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel
from starlette.responses import Response

from cardan.core.engine.messages import SleepMode
from cardan.server.context import ServerContext
from cardan.server.errors import JsonResponse


class SleepState(BaseModel):
    """Whether requests are refused, with 503, until ``/wake_up``."""

    is_sleeping: bool


def sleep_router(context: ServerContext) -> APIRouter:
    """``/sleep``, ``/wake_up``, ``/is_sleeping``."""
    router = APIRouter(tags=["sleep"])
    engine = context.engine

    @router.post("/sleep", response_class=Response)
    async def sleep(
        level: Annotated[int, Query(ge=1, le=2)] = 1,
        mode: Annotated[SleepMode, Query()] = "wait",
    ) -> Response:
        """Give the device's memory back; answers when the engine sleeps.

        Level 1 keeps the weights on the host, level 2 drops them. Running requests end first, or
        are aborted (``mode=abort``); new ones get 503 from now on.
        """
        await engine.sleep(level, mode)
        return Response()

    @router.post("/wake_up", response_class=Response)
    async def wake_up(
        tags: Annotated[list[Literal["weights", "kv_cache"]] | None, Query()] = None,
    ) -> Response:
        """Take the memory again, of all or of what is named; answers when that is done."""
        await engine.wake_up(tags)
        return Response()

    @router.get("/is_sleeping", response_class=Response, responses={200: {"model": SleepState}})
    async def is_sleeping() -> Response:
        """Whether the engine sleeps."""
        return JsonResponse({"is_sleeping": engine.sleep_level > 0})

    return router
