"""Host memory that results of steps are copied to while the device goes on."""

import numpy as np
import torch

from cardan.core.interfaces.device import Device
from cardan.core.interfaces.errors import OutOfMemoryError, UnsupportedError
from cardan.core.interfaces.memory import HostPool
from cardan.core.types.step import Bool, Int32

_TOKEN_BYTES = 8


class HostResult:
    """Room for the results of one step, which its handle has until it was read or dropped."""

    def __init__(self, pool: HostPool, max_num_rows: int) -> None:
        self._pool = pool
        whole = np.frombuffer(pool.buffer(), np.uint8)
        end = _TOKEN_BYTES * max_num_rows
        self._tokens = whole[:end].view(np.int64)
        flags = whole[end : end + 2 * max_num_rows].view(np.bool_)
        self._failed, self._corrupt = flags[:max_num_rows], flags[max_num_rows:]
        parts = (self._tokens, self._failed, self._corrupt)
        self._targets = tuple([torch.from_numpy(part) for part in parts])

    def fill(
        self,
        token_ids: torch.Tensor | None,
        failed: torch.Tensor | None,
        corrupt: torch.Tensor | None,
    ) -> None:
        """Queue copies of what there is, each of at most as many rows as there is room for."""
        for source, target in zip((token_ids, failed, corrupt), self._targets, strict=True):
            if source is not None:
                target[: len(source)].copy_(source, non_blocking=True)

    def token_ids(self, num_samples: int) -> Int32:
        """Of these and all others a copy, which outlasts the room."""
        return self._tokens[:num_samples].astype(np.int32)

    def failed(self, num_samples: int) -> Bool:
        return self._failed[:num_samples].copy()

    def corrupt(self, num_rows: int) -> Bool:
        return self._corrupt[:num_rows].copy()

    def close(self) -> None:
        self._pool.close()


class HostResults:
    """Owner of such rooms: as many as there ever were steps whose results nobody had read."""

    def __init__(self, device: Device, max_num_rows: int) -> None:
        """``max_num_rows`` with padding."""
        self._device = device
        self._max_num_rows = max_num_rows
        self._all: list[HostResult] = []
        self._free: list[HostResult] = []
        self._has_rooms = True

    def lend(self) -> HostResult | None:
        """None: there is no page-locked memory (left), so results are read when they are there."""
        if self._free:
            return self._free.pop()
        if not self._has_rooms:
            return None
        try:
            pool = self._device.memory.host_pool((_TOKEN_BYTES + 2) * self._max_num_rows)
        except (UnsupportedError, OutOfMemoryError):
            self._has_rooms = False
            return None
        self._all.append(HostResult(pool, self._max_num_rows))
        return self._all[-1]

    def take_back(self, room: HostResult) -> None:
        """Its results were read, or nobody will: copies of the next step come after its own."""
        if room in self._all:  # it is still open
            self._free.append(room)

    def close(self) -> None:
        """Give the memory back; no step may be in flight. Idempotent."""
        for room in self._all:
            room.close()
        self._all.clear()
        self._free.clear()
        self._has_rooms = False
