"""Reads the typed values of a GGUF header and trusts none of its lengths."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt

from cardan.core.interfaces.errors import WeightsError

_U64: Final = struct.Struct("<Q")

_BOOL: Final = 7
_STRING: Final = 8
_ARRAY: Final = 9
_NUMBER_DTYPES: Final[dict[int, np.dtype[Any]]] = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    _BOOL: np.dtype("u1"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
# The format allows arrays of arrays without a limit; no known writer nests at all.
_MAX_ARRAY_DEPTH: Final = 4
# Names in a file can be as long as the file; messages show the start.
_MAX_FIELD_SHOWN: Final = 200
# A string is a u64 length and its bytes; an array is a u32 type, a u64 count and its items.
_MIN_STRING_BYTES: Final = 8
_MIN_ARRAY_BYTES: Final = 12


class GGUFCursor:
    """A position in a mapped GGUF file that moves forward over values.

    Every length is checked against the bytes that are left before anything is allocated, so that
    memory stays proportional to the file. `field` arguments say what is being read, for errors.

    Raises:
        WeightsError: names the file, the field and what is wrong with it.
    """

    def __init__(self, buffer: mmap.mmap, path: Path) -> None:
        self._buffer = buffer
        self._path = path
        self._end = len(buffer)
        self.position = 0

    @property
    def remaining(self) -> int:
        """Bytes between the position and the end of the file."""
        return self._end - self.position

    def fail(self, field: str, problem: str) -> NoReturn:
        """Raise the error that says what is wrong with `field`."""
        raise WeightsError(f"{self._path}: {field[:_MAX_FIELD_SHOWN]}: {problem}")

    def skip(self, nbytes: int, field: str) -> bytes:
        """Take `nbytes` raw bytes."""
        if nbytes > self.remaining:
            self.fail(
                field,
                f"needs {nbytes} bytes at offset {self.position}, but the file ends after "
                f"{self.remaining}; it is truncated or damaged, download it again",
            )
        start = self.position
        self.position += nbytes
        return self._buffer[start : self.position]

    def u32(self, field: str) -> int:
        """An unsigned 32-bit integer."""
        return int.from_bytes(self.skip(4, field), "little")

    def u64(self, field: str) -> int:
        """An unsigned 64-bit integer."""
        return int.from_bytes(self.skip(8, field), "little")

    def count(self, field: str, item_nbytes: int) -> int:
        """A 64-bit count of items that each take at least `item_nbytes` of the rest of the file."""
        count = self.u64(field)
        if count * item_nbytes > self.remaining:
            self.fail(
                field,
                f"says {count}, but the {self.remaining} bytes left in the file hold at most "
                f"{self.remaining // item_nbytes}; it is truncated or damaged, download it again",
            )
        return count

    def string(self, field: str) -> str:
        """A UTF-8 string with a 64-bit length."""
        raw = self.skip(self.count(f"{field} (string length)", 1), field)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            self.fail(field, f"is not valid UTF-8 ({error.reason} at byte {error.start})")

    def value(self, type_id: int, field: str, depth: int = 0) -> object:
        """A metadata value: int, float, bool, str, numpy array, list[str] or list of arrays."""
        if type_id == _STRING:
            return self.string(field)
        if type_id == _ARRAY:
            return self._array(field, depth + 1)
        dtype = self._number_dtype(type_id, field)
        number = np.frombuffer(self.skip(dtype.itemsize, field), dtype)
        if type_id == _BOOL:
            return bool(self._checked_bools(number, field)[0])
        return number[0].item()

    def _number_dtype(self, type_id: int, field: str) -> np.dtype[Any]:
        dtype = _NUMBER_DTYPES.get(type_id)
        if dtype is None:
            self.fail(field, f"has unknown value type {type_id} (known: 0 to 12)")
        return dtype

    def _array(self, field: str, depth: int) -> object:
        if depth > _MAX_ARRAY_DEPTH:
            self.fail(field, f"nests arrays deeper than {_MAX_ARRAY_DEPTH} levels")
        type_id = self.u32(f"{field} (array type)")
        length = f"{field} (array length)"
        if type_id == _STRING:
            return self._strings(self.count(length, _MIN_STRING_BYTES), field)
        if type_id == _ARRAY:
            count = self.count(length, _MIN_ARRAY_BYTES)
            return [self._array(field, depth + 1) for _ in range(count)]
        dtype = self._number_dtype(type_id, field)
        count = self.count(length, dtype.itemsize)
        numbers = np.frombuffer(self.skip(count * dtype.itemsize, field), dtype)
        return self._checked_bools(numbers, field) if type_id == _BOOL else numbers

    def _checked_bools(self, numbers: npt.NDArray[Any], field: str) -> npt.NDArray[np.bool_]:
        raw = numbers.astype(np.uint8, copy=False)
        if raw.size and raw.max() > 1:
            self.fail(field, f"has a boolean that is neither 0 nor 1 but {raw.max()}")
        return raw.astype(np.bool_)

    def _strings(self, count: int, field: str) -> list[str]:
        # A vocabulary has hundreds of thousands of strings: no method call for each of them.
        buffer, end, position = self._buffer, self._end, self.position
        unpack = _U64.unpack_from
        strings: list[str] = []
        append = strings.append
        try:
            for _ in range(count):
                (nbytes,) = unpack(buffer, position)
                position += 8
                stop = position + nbytes
                if stop > end:
                    break
                append(str(buffer[position:stop], "utf-8"))
                position = stop
        except struct.error:
            pass
        except UnicodeDecodeError as error:
            self.fail(
                f"{field}[{len(strings)}]",
                f"is not valid UTF-8 ({error.reason} at byte {error.start})",
            )
        if len(strings) < count:
            self.fail(
                f"{field}[{len(strings)}]",
                "the string runs past the end of the file; it is truncated or damaged, "
                "download it again",
            )
        self.position = position
        return strings
