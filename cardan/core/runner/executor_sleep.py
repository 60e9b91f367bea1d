"""What of an executor's memory sleeps."""

import gc
from collections.abc import Sequence

from cardan.core.interfaces.device import Device

# The level at which the host keeps the weights; at others they are dropped by whoever has them.
KEEP_WEIGHTS = 1
_WEIGHTS, _KV = "weights", "kv"


class ExecutorSleep:
    """Which parts of one device's memory sleep, and at which level."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._asleep: frozenset[str] = frozenset()
        # What of it the device has to bring back.
        self._laid: frozenset[str] = frozenset()

    @property
    def asleep(self) -> tuple[str, ...]:
        return tuple(sorted(self._asleep))

    @property
    def has_weights(self) -> bool:
        """Whether there is memory for weights."""
        return _WEIGHTS not in self._asleep

    def begin(self, level: int) -> None:
        """Have the device give memory back. What uses it has been dropped; weights only where they
        are not to be kept.

        Raises:
            OutOfMemoryError: the host cannot keep the weights; nothing sleeps.
        """
        gc.collect()  # a model's modules refer to each other
        laid = (_WEIGHTS, _KV) if level == KEEP_WEIGHTS else (_KV,)
        self._device.memory.sleep(level, laid)
        self._laid, self._asleep = frozenset(laid), frozenset({_WEIGHTS, _KV})

    def end(self, tags: Sequence[str]) -> bool:
        """Take the memory of ``tags`` again, as far as they sleep; whether weights were lost.

        Raises:
            OutOfMemoryError: it does not fit now; it can be called again.
            RuntimeError: the device lost what nobody can make again.
        """
        wanted = self._asleep.intersection(tags)
        lost: frozenset[str] = frozenset()
        if laid := wanted & self._laid:
            lost = self._device.memory.wake(tuple(sorted(laid))).lost
            self._laid -= laid
        self._asleep -= wanted
        if "comm" in lost:
            raise RuntimeError(
                f"{self._device.info.name} lost its ranks while it slept; start the engine anew"
            )
        return _WEIGHTS in lost
