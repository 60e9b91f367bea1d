"""Calling exported C functions, and recording the calls. Imports no torch.

Each exported function takes one pointer to a struct of 8-byte fields and returns a status
(``pool.h``), so a call is data: a function's address and its fields. A list of such calls can be
run again by C without Python in between.
"""

import ctypes
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

# Kinds of fields in C: a pointer, int64_t, double.
Pointer = "Q"
Size = "q"
Real = "d"


# From the values of a call's fields: address and bytes of a weight.
Reads = Callable[[tuple[Any, ...]], tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the function at ``address`` with the packed ``fields``.

    ``reads``: address and bytes of a weight that it reads from memory; 0 bytes: none.
    """

    address: int
    fields: bytes
    reads: tuple[int, int] = (0, 0)


@dataclass(slots=True)
class Recorder:
    """Takes down the calls that one thread makes of a library's functions.

    Owned by the library: like a device's stream, it is one for all of its functions.
    """

    calls: list[Call] | None = None
    thread: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def record(self) -> Iterator[None]:
        """Take down the calls of this thread into ``calls``, which a new list replaces; waits
        while another thread records."""
        with self.lock:
            self.thread, self.calls = threading.get_ident(), []
            try:
                yield
            finally:
                self.calls = None

    def take(self) -> list[Call]:
        """The calls since the recording began or since the last ``take``."""
        taken, self.calls = self.calls or [], []
        return taken

    def add(self, call: Call) -> None:
        if self.calls is not None and threading.get_ident() == self.thread:
            self.calls.append(call)


class NativeFunction:
    """An exported function, called with the values of its struct's fields in order.

    The return value is the kernel's status. While its library records, calls are made and taken
    down.
    """

    __slots__ = ("_address", "_call", "_pack", "_reads", "_recorder")

    def __init__(
        self, function: Any, fields: Sequence[str], recorder: Recorder, reads: Reads | None = None
    ) -> None:
        """``function``: of ctypes; its types are set here. ``reads`` gives ``Call.reads`` from the
        values of the fields."""
        function.argtypes = (ctypes.c_char_p,)
        function.restype = ctypes.c_int
        self._call: Callable[[bytes], int] = function
        self._address = ctypes.cast(function, ctypes.c_void_p).value or 0
        self._pack = struct.Struct("=" + "".join(fields)).pack
        self._reads = reads
        self._recorder = recorder

    def call(self, *values: float) -> Call:
        """The call as data."""
        reads = (0, 0) if self._reads is None else self._reads(values)
        return Call(self._address, self._pack(*values), reads)

    def __call__(self, *values: float) -> int:
        fields = self._pack(*values)
        if self._recorder.calls is not None:
            self._recorder.add(self.call(*values))
        return self._call(fields)
