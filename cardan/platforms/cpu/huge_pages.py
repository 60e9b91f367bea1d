"""Weights on huge pages: reading them then misses fewer translations of addresses."""

import ctypes
import errno
import sys
from collections.abc import Iterable

from torch import Tensor

# Pages of this size are what Linux makes of ordinary ones on x86 and, mostly, on Arm.
HUGE_PAGE_BYTES = 2 << 20
# Advice of madvise(2): may be huge from now on; be huge at once (Linux 6.1).
_MAY_BE_HUGE, _COLLAPSE = 14, 25


def use_huge_pages(tensors: Iterable[Tensor]) -> int:
    """Have the memory of contiguous tensors on the CPU put on huge pages where the system does
    that; contents stay as they are.

    Only whole huge pages within a tensor are touched, so no memory is added. Files that are mapped
    are left to the system. Costs about as long as copying the tensors. Returns the bytes that are
    on huge pages now, 0 on other systems than Linux.
    """
    if not sys.platform.startswith("linux"):
        return 0
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
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
