"""Memory of captured graphs: handed out during capture, kept for their replays."""

import weakref

import numpy as np
import numpy.typing as npt
import torch

_ALIGNMENT = 64
_LEAST_CHUNK = 1 << 20


class GraphMemory:
    """Memory that graphs share which never run at the same time.

    What a tensor held is handed out again when nobody refers to it any more, as the order of a
    graph's calls allows; sizes are rounded, so that graphs of other numbers of rows use it too.
    Chunks are never given back while a graph or a tensor is alive.
    """

    def __init__(self) -> None:
        self._chunk: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self._used = 0
        self._num_bytes = 0
        # Freed pieces by their size. A piece keeps its chunk alive.
        self._free: dict[int, list[npt.NDArray[np.uint8]]] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all chunks."""
        return self._num_bytes

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the same dtype, shape and strides; contents undefined."""
        num_bytes = tensor.untyped_storage().nbytes()
        if not num_bytes:
            return tensor
        size = _rounded(num_bytes)
        freed = self._free.setdefault(size, [])
        piece = freed.pop() if freed else self._new_piece(size)
        # Torch's storage refers to this array alone, so the two die together.
        held = piece[:num_bytes]
        weakref.finalize(held, freed.append, piece).atexit = False
        flat = torch.from_numpy(held).view(tensor.dtype)
        return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def _new_piece(self, size: int) -> npt.NDArray[np.uint8]:
        if self._used + size > len(self._chunk):
            # Not written, so not resident, until it is used.
            room = max(size, _LEAST_CHUNK)
            chunk = np.empty(room + _ALIGNMENT, np.uint8)
            first = -chunk.ctypes.data % _ALIGNMENT
            self._chunk, self._used = chunk[first : first + room], 0
            self._num_bytes += room
        piece = self._chunk[self._used : self._used + size]
        self._used += size
        return piece


def _rounded(num_bytes: int) -> int:
    """Up to a quarter more: four sizes between one power of two and the next."""
    step = max(_ALIGNMENT, 1 << num_bytes.bit_length() >> 3)
    return -(-num_bytes // step) * step
