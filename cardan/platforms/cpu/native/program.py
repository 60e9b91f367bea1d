"""Recorded calls that C makes again, without Python in between. Imports no torch."""

import ctypes
from collections.abc import Sequence

from cardan.platforms.cpu.native.function import Call, NativeFunction, Pointer, Size
from cardan.platforms.cpu.native.library import NativeLibrary, check

_WORD = 8


class Program:
    """A list of calls. Owns copies of their structs; what the structs point to, the caller owns."""

    def __init__(self, native: NativeLibrary, calls: Sequence[Call]) -> None:
        calls = _reading_ahead(native.function("cardan_read_ahead", Pointer, Size), calls)
        self._run = native.function("cardan_run_program", Pointer, Size, Pointer)
        self._num_calls = len(calls)
        # Structs are made of words, so in an array of words each is aligned.
        fields = b"".join(call.fields for call in calls)
        self._fields = (ctypes.c_uint64 * (len(fields) // _WORD)).from_buffer_copy(fields)
        place = ctypes.addressof(self._fields)
        entries: list[int] = []
        for call in calls:
            entries += (call.address, place)
            place += len(call.fields)
        self._entries = (ctypes.c_uint64 * len(entries))(*entries)
        self._failed = ctypes.c_int64(-1)

    @property
    def num_bytes(self) -> int:
        return ctypes.sizeof(self._fields) + ctypes.sizeof(self._entries)

    def run(self) -> None:
        """Make the calls.

        Raises:
            OutOfMemoryError: a kernel found no memory for its scratch.
            RuntimeError: a kernel refused what it read; later calls were not made.
        """
        entries, failed = ctypes.addressof(self._entries), ctypes.addressof(self._failed)
        status = self._run(entries, self._num_calls, failed)
        if status:
            check(status, f"recorded call {self._failed.value} of {self._num_calls}")


def _reading_ahead(read_ahead: NativeFunction, calls: Sequence[Call]) -> list[Call]:
    """``calls``, each that reads a weight after a word on the weight that is read next, which
    threads fetch while they have nothing to do."""
    result: list[Call] = []
    following: Call | None = None
    for call in reversed(calls):
        result.append(call)
        if call.reads[1]:
            if following is not None:
                result.append(read_ahead.call(*following.reads))
            following = call
    result.reverse()
    return result
