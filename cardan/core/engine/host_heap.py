"""What the C library keeps of freed memory."""

import contextlib
import ctypes


def give_back_freed_memory() -> None:
    """Hand free pages of this process's heap back to the host; takes milliseconds.

    The C library keeps what was freed, so that a process stays as large as its largest moment was.
    Without glibc nothing happens.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
