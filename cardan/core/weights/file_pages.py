"""Letting go of the pages of a mapped file, of which only an address is known."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

_MAPS = Path("/proc/self/maps")


def release_mapping(address: int) -> bool:
    """Drop the pages of the file mapping that ``address`` lies in from this process's memory.

    Only for private mappings that nobody wrote to: reading brings the pages back from the page
    cache. Returns False, and does nothing, where the address is in no file mapping or the system
    does not say.
    """
    advice = getattr(mmap, "MADV_DONTNEED", None)
    span = _file_mapping(address)
    if advice is None or span is None:
        return False
    start, stop = span
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return bool(madvise(start, stop - start, advice) == 0)


def _file_mapping(address: int) -> tuple[int, int] | None:
    """First byte and end of the file mapping around ``address``."""
    try:
        lines = _MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        # Start and stop, permissions, offset, device, inode, path.
        span, _, _, _, inode, *_ = line.split(maxsplit=5)
        first, _, last = span.partition("-")
        start, stop = int(first, 16), int(last, 16)
        if start <= address < stop:
            return (start, stop) if inode != "0" else None
    return None
