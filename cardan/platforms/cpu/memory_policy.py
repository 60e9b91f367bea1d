"""On which memory nodes a thread's pages are put: Linux's calls, which no library of C wraps."""

import ctypes
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

DEFAULT: Final = 0
# The first node that is named, others when it is full.
PREFERRED: Final = 1
INTERLEAVE: Final = 3

# Machine -> numbers of set_mempolicy and get_mempolicy.
_CALLS: dict[str, tuple[int, int]] = {
    "x86_64": (238, 239),
    "aarch64": (237, 236),
    "riscv64": (237, 236),
}
_MOST_NODES = 1024
_BITS = 64
_Mask = ctypes.c_uint64 * (_MOST_NODES // _BITS)


@dataclass(frozen=True, slots=True)
class MemoryPolicy:
    """A mode of the above, with its flags, and the nodes it speaks of."""

    mode: int
    nodes: tuple[int, ...] = ()


def policy_for(nodes: Sequence[int]) -> MemoryPolicy:
    """Pages on the one node of ``nodes``, or in turns on all of them."""
    return MemoryPolicy(PREFERRED if len(nodes) == 1 else INTERLEAVE, tuple(nodes))


def set_policy(policy: MemoryPolicy) -> None:
    """For the pages that the calling thread, and threads that it makes later, will touch first.

    Raises:
        OSError: the system has no such call, forbids it (containers do), or has no such node.
    """
    mask = _Mask()
    for node in policy.nodes:
        if not 0 <= node < _MOST_NODES:
            raise OSError(f"memory node {node} is not between 0 and {_MOST_NODES - 1}")
        mask[node // _BITS] |= 1 << node % _BITS
    # The kernel counts one bit less than it is told.
    _call(0, ctypes.c_long(policy.mode), mask, ctypes.c_ulong(_MOST_NODES + 1))


def current_policy() -> MemoryPolicy:
    """The calling thread's.

    Raises:
        OSError: as ``set_policy``.
    """
    mode, mask = ctypes.c_int(0), _Mask()
    most = ctypes.c_ulong(_MOST_NODES + 1)
    null, flags = ctypes.c_void_p(None), ctypes.c_ulong(0)
    _call(1, ctypes.byref(mode), mask, most, null, flags)
    nodes = [n for n in range(_MOST_NODES) if mask[n // _BITS] >> n % _BITS & 1]
    return MemoryPolicy(mode.value, tuple(nodes))


def refusal() -> str | None:
    """Why policies cannot be set here, or None if they can. Changes nothing."""
    try:
        set_policy(current_policy())
    except OSError as error:
        return error.strerror or str(error)
    return None


def _call(which: int, *arguments: object) -> None:
    numbers = _CALLS.get(platform.machine())
    if platform.system() != "Linux" or numbers is None:
        raise OSError(f"no memory policies on {platform.system()} {platform.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(numbers[which]), *arguments):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
