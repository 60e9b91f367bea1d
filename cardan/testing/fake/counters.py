"""What the fake device did, for tests and benchmarks."""

from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True)
class DeviceCounters:
    """Counts since the device was opened.

    Attributes:
        launches: operations (a replayed graph is one) put on a queue.
        syncs: times that an operation or a read inside ``inference()`` had to wait for the device.
        captures, replays: of graphs.
        steps: events recorded on the main stream that the device has passed.
        busy_seconds: from the first operation of a step to its event, over all steps.
        idle_gaps: seconds, newest last, that the main queue stood empty between two steps.
    """

    launches: int = 0
    syncs: int = 0
    captures: int = 0
    replays: int = 0
    steps: int = 0
    busy_seconds: float = 0.0
    idle_gaps: deque[float] = field(default_factory=lambda: deque(maxlen=65536))
