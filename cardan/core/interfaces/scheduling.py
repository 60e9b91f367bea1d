"""Scheduling policies: who goes first. Mechanics (chunking, preemption) stay in the core."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class RequestView:
    """What a policy may know of a request; ``arrival`` counts requests as they came."""

    request_id: str
    priority: int
    arrival: int
    arrival_time: float
    num_prompt_tokens: int
    max_tokens: int
    cache_salt: str | None = None
    adapter: str | None = None


class SchedulingPolicy(ABC):
    """Orders requests, found by name in the group ``cardan.policies``."""

    name: ClassVar[str]
    contract: ClassVar[tuple[int, int]]

    @abstractmethod
    def sort_key(self, request: RequestView) -> tuple[float, ...]:
        """Smaller goes first; called once when the request arrives. The last goes first when
        memory is short. Ties are broken by arrival."""

    def admit(self, request: RequestView, num_waiting: int, num_running: int) -> str | None:
        """(optional) A reason to refuse the request now (503). Default: admit."""
        return None
