"""Weights on huge pages: reading them then misses fewer translations of addresses."""

import ctypes
import errno
import sys
import threading
import weakref
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# Pages of this size are what Linux makes of ordinary ones on x86 and, mostly, on Arm.
HUGE_PAGE_BYTES = 2 << 20
# Advice of madvise(2): may be huge from now on; be huge at once (Linux 6.1).
_MAY_BE_HUGE, _COLLAPSE = 14, 25
_ALIGNMENT = 64
_CHUNK_BYTES = 8 * HUGE_PAGE_BYTES
# From here on a tensor has mostly whole huge pages to itself.
_LARGE_BYTES = 4 * HUGE_PAGE_BYTES


Bytes = npt.NDArray[np.uint8]


class WeightMemory:
    """Memory of weights on huge pages: many small ones share a page.

    A chunk lives as long as any tensor in it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # The array that owns the newest chunk; tensors in it refer to it.
        self._owner: weakref.ref[Bytes] | None = None
        self._used = 0

    def empty(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], aligned to 64 bytes; contents undefined."""
        with self._lock:
            owner = None if self._owner is None else self._owner()
            if owner is None or self._used + num_bytes > len(owner):
                owner = np.empty(max(num_bytes, _CHUNK_BYTES) + HUGE_PAGE_BYTES, np.uint8)
                self._owner = weakref.ref(owner)
                self._used = -owner.ctypes.data % HUGE_PAGE_BYTES
                _advise_huge(owner)
            begin = self._used
            self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return torch.from_numpy(owner[begin : begin + num_bytes])

    def place(self, weight: Tensor) -> Tensor:
        """``weight``, or a copy of it, on huge pages where the system has them.

        What is large keeps its memory; a mapped file then stays as it is.
        """
        if not (weight.is_cpu and weight.is_contiguous()) or _madvise() is None:
            return weight
        if weight.nbytes >= _LARGE_BYTES:
            use_huge_pages([weight])
            return weight
        return self.empty(weight.nbytes).view(weight.dtype).view(weight.shape).copy_(weight)


def use_huge_pages(tensors: Iterable[Tensor]) -> int:
    """Have the memory of contiguous tensors on the CPU put on huge pages where the system does
    that; contents stay as they are.

    Only whole huge pages within a tensor are touched, so no memory is added. Files that are mapped
    are left to the system. Costs about as long as copying the tensors. Returns the bytes that are
    on huge pages now, 0 on other systems than Linux.
    """
    madvise = _madvise()
    if madvise is None:
        return 0
    moved = 0
    for tensor in tensors:
        if not (tensor.is_cpu and tensor.is_contiguous()):
            continue
        begin = -(-tensor.data_ptr() // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        end = tensor.data_ptr() + tensor.numel() * tensor.element_size()
        size = (end - begin) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        if size <= 0 or madvise(begin, size, _MAY_BE_HUGE):
            continue
        # Tried again once where another thread moved the same pages.
        is_moved = not madvise(begin, size, _COLLAPSE) or (
            ctypes.get_errno() == errno.EAGAIN and not madvise(begin, size, _COLLAPSE)
        )
        moved += size if is_moved else 0
    return moved


def _advise_huge(owner: Bytes) -> None:
    """Before anything is written: then pages are huge from the start."""
    madvise = _madvise()
    if madvise is not None:
        skipped = -owner.ctypes.data % HUGE_PAGE_BYTES
        size = (len(owner) - skipped) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        madvise(owner.ctypes.data + skipped, size, _MAY_BE_HUGE)


def _madvise() -> Callable[[int, int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise
