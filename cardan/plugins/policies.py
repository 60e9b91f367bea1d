"""Scheduling policies of the tree."""

from typing import ClassVar

from cardan.core.interfaces.scheduling import RequestView, SchedulingPolicy


class FirstComePolicy(SchedulingPolicy):
    """Requests run in the order in which they came; priorities are not looked at."""

    name: ClassVar[str] = "fcfs"
    contract: ClassVar[tuple[int, int]] = (1, 0)

    def sort_key(self, request: RequestView) -> tuple[float, ...]:
        return (request.arrival,)


class PriorityPolicy(SchedulingPolicy):
    """The lower ``priority`` goes first; requests of equal priority run as they came."""

    name: ClassVar[str] = "priority"
    contract: ClassVar[tuple[int, int]] = (1, 0)

    def sort_key(self, request: RequestView) -> tuple[float, ...]:
        return (request.priority, request.arrival)
