"""Page-locked host memory of exact size."""

import contextlib
import mmap

import torch
from torch import Tensor

from cardan.core.interfaces.errors import ConfigError, OutOfMemoryError
from cardan.core.interfaces.memory import HostPool

# Locked for all devices of this process.
_PORTABLE = 1


class GpuHostPool(HostPool):
    """Host memory of its own mapping, page-locked where asked for.

    torch's own page-locked memory is rounded up to a power of two and kept when it is freed; pools
    are too large for that.
    """

    def __init__(self, num_bytes: int, pinned: bool, device: torch.device) -> None:
        """
        Raises:
            ConfigError: ``num_bytes`` is negative.
            OutOfMemoryError: the host has too little memory, or may lock too little.
        """
        if num_bytes < 0:
            raise ConfigError(f"a host pool of {num_bytes} bytes; num_bytes must be at least 0")
        self.num_bytes = num_bytes
        self._device = device
        self._is_locked = False
        try:
            mapping = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise OutOfMemoryError(_refusal(num_bytes, str(error))) from error
        self._tensor: Tensor | None = torch.frombuffer(mapping, dtype=torch.uint8)
        if pinned and num_bytes:
            self._lock(self._tensor)

    @property
    def is_closed(self) -> bool:
        return self._tensor is None

    def buffer(self) -> memoryview:
        return self.tensor().numpy().data

    def tensor(self) -> Tensor:
        """[num_bytes] uint8, a view of the pool."""
        if self._tensor is None:
            raise ValueError("this host pool was closed")
        return self._tensor[: self.num_bytes]

    def close(self) -> None:
        """Give the memory back, once no view of it is left; copies of the device are waited for.
        Idempotent."""
        tensor, self._tensor = self._tensor, None
        if tensor is not None and self._is_locked:
            torch.cuda.synchronize(self._device)
            torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())

    def _lock(self, tensor: Tensor) -> None:
        with torch.cuda.device(self._device):
            code = int(
                torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), len(tensor), _PORTABLE)
            )
            if code == 0:
                self._is_locked = True
                return
            # The runtime tells of the refusal again after the next launch, whoever that is.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=self._device).add_(1)
        self._tensor = None
        runtime = "CUDA" if torch.version.hip is None else "HIP"
        raise OutOfMemoryError(_refusal(self.num_bytes, f"{runtime} error {code} while locking it"))


def _refusal(num_bytes: int, reason: str) -> str:
    return (
        f"a host pool of {num_bytes / 2**20:.1f} MiB does not fit ({reason}); make it smaller, or "
        "raise the memory that the process may use and lock (ulimit -l, the container's limits)"
    )
