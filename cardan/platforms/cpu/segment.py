"""Memory that the processes of one host share, and collectives over it. Imports no torch.

Buffers are addresses; their owners keep them alive during a call.
"""

import ctypes
import os
import secrets
import stat
from typing import Final

from cardan.core.interfaces.errors import CardanError, ConfigError
from cardan.platforms.cpu.native.library import (
    PEER_FAILURES,
    NativeLibrary,
    Pointer,
    Size,
    check,
)

# A rank waits so long for the others before it gives up.
PATIENCE_S: Final = 60.0
# Bytes that a rank shares at once, twice; larger buffers go in pieces.
SLOT_BYTES: Final = 512 * 1024
_SEAT_BYTES = 128
_NONCE_BYTES = 8
# A status of ``communicator.c``.
_NO_SEGMENT = 19


class Segment:
    """One rank's place in the shared memory of a group. Closing it tells the others.

    All ranks call the same methods in the same order. Each raises CardanError, which names the
    rank, if one has left or died or does not come in time; so do all calls after that.
    """

    def __init__(
        self,
        native: NativeLibrary,
        descriptor: int,
        rank: int,
        world_size: int,
        patience_s: float = PATIENCE_S,
        slot_bytes: int = SLOT_BYTES,
    ) -> None:
        """``descriptor``: of zeros, ``segment_bytes`` of them; the segment's from here on.

        ``slot_bytes``: a multiple of 64.

        Raises:
            OSError: the file cannot be mapped or locked.
        """
        bind = native.function
        self._barrier = bind("cardan_barrier", Pointer)
        self._all_reduce = bind("cardan_all_reduce", Pointer, Pointer, Size, Size, Size, Size)
        self._all_gather = bind("cardan_all_gather", Pointer, Pointer, Pointer, Size, Size, Size)
        self._reduce_scatter = bind(
            "cardan_reduce_scatter", Pointer, Pointer, Pointer, Size, Size, Size
        )
        self._broadcast = bind("cardan_broadcast", Pointer, Pointer, Size, Size, Size)
        self._culprit = bind("cardan_group_culprit", Pointer, Pointer)
        self._close = bind("cardan_group_close", Pointer)
        self._group: int | None = None
        out = ctypes.c_uint64(0)
        status = bind("cardan_group_open", Size, Size, Size, Size, Size, Pointer)(
            descriptor, rank, world_size, slot_bytes, int(patience_s * 1e9), ctypes.addressof(out)
        )
        if status:
            os.close(descriptor)
            if status == _NO_SEGMENT:
                raise OSError("the ranks' shared memory cannot be mapped or locked")
            check(status)
        self._group = out.value

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self._check(self._barrier(self._open()))

    def all_reduce(self, buffer: int, count: int, kind: int, op: int, threads: int) -> None:
        """Replace ``count`` elements by their sum (``op`` 0) or maximum (1) over ranks.

        ``kind``: 0 float32, 1 bfloat16, 2 float16. Sums are float32 in rank order, rounded once.
        """
        self._check(self._all_reduce(self._open(), buffer, count, kind, op, threads))

    def all_gather(self, source: int, out: int, outer: int, inner: int, threads: int) -> None:
        """``outer`` rows of ``inner`` bytes become rows of the ranks' rows one after the other."""
        self._check(self._all_gather(self._open(), source, out, outer, inner, threads))

    def reduce_scatter(self, source: int, out: int, count: int, kind: int, threads: int) -> None:
        """Sum this rank's of ``source``'s equal parts, which have ``count`` elements each."""
        self._check(self._reduce_scatter(self._open(), source, out, count, kind, threads))

    def broadcast(self, buffer: int, num_bytes: int, root: int, threads: int) -> None:
        """Replace the bytes by those of rank ``root``."""
        self._check(self._broadcast(self._open(), buffer, num_bytes, root, threads))

    def close(self) -> None:
        """Leave; the others' running and later collectives fail. Idempotent."""
        group, self._group = self._group, None
        if group is not None:
            self._close(group)

    def _open(self) -> int:
        if self._group is None:
            raise ConfigError("this communicator is closed")
        return self._group

    def _check(self, status: int) -> None:
        if status:
            out = ctypes.c_int64(0)
            self._culprit(self._open(), ctypes.addressof(out))
            raise CardanError(f"rank {out.value} {PEER_FAILURES[status]}")


def segment_bytes(world_size: int, slot_bytes: int = SLOT_BYTES) -> int:
    """Size of the shared memory of a group; pages are used only when something is shared."""
    return world_size * (_SEAT_BYTES + 2 * slot_bytes)


def create_segment(world_size: int) -> tuple[int, int]:
    """A nameless file in memory, which ends with the last process that has it, and a number to
    recognise it by.

    Raises:
        OSError: the system has no such files, or none left.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError("the system has no nameless files in memory")
    nonce = secrets.randbits(62)
    descriptor = os.memfd_create("cardan-ranks")
    try:
        os.ftruncate(descriptor, segment_bytes(world_size))
        os.pwrite(descriptor, _bytes(nonce), segment_bytes(world_size))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor, nonce


def open_segment(pid: int, number: int, nonce: int, world_size: int) -> int:
    """Open what process ``pid`` created as descriptor ``number``.

    Raises:
        OSError: it is something else, or may not be looked at.
    """
    path = f"/proc/{pid}/fd/{number}"
    size = segment_bytes(world_size) + _NONCE_BYTES
    found = os.stat(path)
    # Looked at before, since opening something else might wait.
    if stat.S_ISREG(found.st_mode) and found.st_size == size:
        descriptor = os.open(path, os.O_RDWR)
        if os.pread(descriptor, _NONCE_BYTES, size - _NONCE_BYTES) == _bytes(nonce):
            return descriptor
        os.close(descriptor)
    raise OSError("the ranks run on different hosts or in different containers")


def _bytes(nonce: int) -> bytes:
    return nonce.to_bytes(_NONCE_BYTES, "little")
