"""A scheduling policy: short requests first, and yet nobody waits for ever."""

from typing import ClassVar

from cardan.core.interfaces.scheduling import RequestView, SchedulingPolicy

# Seconds of waiting that a token of work weighs.
SECONDS_PER_TOKEN = 0.05


class AgedShortestPolicy(SchedulingPolicy):
    """Orders by the time of arrival plus a share for each token that the request may take.

    A request is passed only by those that come within its share: one of 1000 tokens waits for
    shorter ones that come less than 50 s behind it, and for none after that.
    """

    name: ClassVar[str] = "aged_shortest"
    contract: ClassVar[tuple[int, int]] = (1, 0)

    def sort_key(self, request: RequestView) -> tuple[float, ...]:
        work = request.num_prompt_tokens + request.max_tokens
        return (request.arrival_time + SECONDS_PER_TOKEN * work,)
