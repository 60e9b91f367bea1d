"""Asking Linux for the tile registers of Intel's AMX. Imports no torch.

They are 8 KiB a thread that the kernel saves and restores, so a process may use them only after it
has asked (Documentation/arch/x86/xstate.rst of Linux). What is granted holds for all threads of
the process, present and future, and for forked children.
"""

import ctypes
import os
import platform
import sys
from collections.abc import Callable

# Of <asm/unistd_64.h> and <asm/prctl.h>, and the number of the registers among XSAVE's components.
_SYS_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18


def _arch_prctl(code: int, argument: int) -> int:
    """The system call: 0, or the number of the error."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise OSError("only 64-bit Linux on x86 grants tile registers")
    libc = ctypes.CDLL(None, use_errno=True)
    words = (ctypes.c_long(_SYS_ARCH_PRCTL), ctypes.c_long(code), ctypes.c_long(argument))
    return ctypes.get_errno() if libc.syscall(*words) else 0


def amx_refusal(arch_prctl: Callable[[int, int], int] = _arch_prctl) -> str | None:
    """Ask for the tile registers; None if this process has them now, or why it has not. Asking
    again does no harm.

    ``arch_prctl``: the system call of this name, which returns 0 or the number of the error.
    """
    try:
        error = arch_prctl(_ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)
    except OSError as found:
        return str(found)
    return f"Linux refuses the tile registers: {os.strerror(error)}" if error else None
