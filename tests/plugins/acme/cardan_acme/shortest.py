"""A policy: the shortest prompt goes first."""

from typing import ClassVar

from cardan.core.interfaces.scheduling import RequestView, SchedulingPolicy


class ShortestPolicy(SchedulingPolicy):
    name: ClassVar[str] = "acme_shortest"
    contract: ClassVar[tuple[int, int]] = (1, 0)

    def sort_key(self, request: RequestView) -> tuple[float, ...]:
        return (request.num_prompt_tokens,)
