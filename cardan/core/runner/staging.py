"""Host memory that steps are packed in until the device has copied it."""

import numpy as np
import torch

from cardan.core.interfaces.device import Device, Event
from cardan.core.interfaces.errors import UnsupportedError
from cardan.core.interfaces.memory import HostPool
from cardan.core.types.step import Int32

# A step that is packed while two others run, and one more: so a turn is never waited for.
_NUM_BUFFERS = 4


class StagingBuffer:
    """Some words in page-locked memory, where the device has it, and as tensors.

    ``is_in_use``: a copy from it may not have ended yet; ``event`` comes after that copy, None as
    long as nobody knows one. ``head`` is its first words.
    """

    def __init__(self, device: Device, num_words: int, num_head_words: int) -> None:
        self._pool: HostPool | None = None
        try:
            self._pool = device.memory.host_pool(4 * num_words)
            self.words: Int32 = np.frombuffer(self._pool.buffer(), np.int32)
        except UnsupportedError:
            self.words = np.zeros(num_words, np.int32)
        self.whole = torch.from_numpy(self.words)
        self.head = self.whole[:num_head_words]
        self.is_in_use = False
        self.event: Event | None = None

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()


class StagingRing:
    """Owner of buffers that take turns, one a step.

    From ``take`` on a buffer belongs to the step that is being prepared; after that step was queued
    it belongs to the device until the event of ``hold_until`` has passed. ``take`` waits for that,
    so no step in flight is ever overwritten, however many there are.
    """

    def __init__(self, device: Device, num_words: int, num_head_words: int) -> None:
        self._device = device
        self.buffers = tuple(
            StagingBuffer(device, num_words, num_head_words) for _ in range(_NUM_BUFFERS)
        )
        self._turn = 0

    def take(self) -> int:
        """The place of the buffer whose turn it is."""
        self._turn = (self._turn + 1) % _NUM_BUFFERS
        buffer = self.buffers[self._turn]
        if buffer.is_in_use:
            if buffer.event is None:  # its step failed before it had an end
                self._device.synchronize()
            else:
                buffer.event.synchronize()
        buffer.is_in_use, buffer.event = True, None
        return self._turn

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        for buffer in self.buffers:
            buffer.close()

    def hold_until(self, event: Event | None) -> None:
        """``event`` ends the step that took the last buffer; None: the device computed at once."""
        buffer = self.buffers[self._turn]
        if buffer.is_in_use and buffer.event is None:
            buffer.event = event
            buffer.is_in_use = event is not None
