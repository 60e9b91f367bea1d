"""Faults that happen at one step of the fake device."""

import os
import threading
import time
from pathlib import Path

from cardan.core.interfaces.errors import OutOfMemoryError
from cardan.testing.fake.settings import FakeSettings, StepFault

# Exit status of a process that the fault ``die`` ended.
DIE_STATUS = 77


class StepFaults:
    """Acts out ``settings.step_faults``; on the thread that runs the steps."""

    def __init__(self, settings: FakeSettings) -> None:
        self._kinds: dict[int, list[StepFault]] = {}
        for fault in settings.step_faults:
            self._kinds.setdefault(fault.step, []).append(fault.kind)
        self._slow_seconds = settings.slow_ms / 1000
        self._marker = Path(settings.marker) if settings.marker else None
        self._released = threading.Event()

    def before_step(self, index: int) -> None:
        """Let the faults of step ``index`` happen, numbered from 0.

        Raises:
            RuntimeError: the step's fault is ``raise``, or ``stuck`` and the device was closed.
            OutOfMemoryError: the step's fault is ``oom``.
        """
        kinds = self._kinds.get(index)
        if not kinds or not self._takes_marker():
            return
        for kind in kinds:
            match kind:
                case "slow":
                    time.sleep(self._slow_seconds)
                case "stuck":
                    self._released.wait()
                    raise RuntimeError(f"fake device: closed while step {index} was stuck")
                case "raise":
                    raise RuntimeError(f"fake device: step {index} failed")
                case "oom":
                    raise OutOfMemoryError(
                        f"fake device: out of memory in step {index}; lower "
                        "scheduler.max_num_seqs or scheduler.max_num_batched_tokens"
                    )
                case "die":
                    os._exit(DIE_STATUS)

    def release(self) -> None:
        """End a stuck step, and let none get stuck any more."""
        self._released.set()

    def _takes_marker(self) -> bool:
        """Whether faults may still happen; if so, they do not happen again."""
        if self._marker is None:
            return True
        try:
            self._marker.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True
