"""A memory-mapped GGUF file: its metadata and its tensor table, without reading tensor data.

The format is the one of ggml's `docs/gguf.md`, versions 2 and 3, little endian.
"""

from __future__ import annotations

import math
import mmap
import stat
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

import numpy as np
import numpy.typing as npt

from cardan.core.interfaces.errors import WeightsError
from cardan.core.types.errors import shown
from cardan.core.types.ggml import BLOCK_FORMATS, GGMLType
from cardan.core.weights.gguf_cursor import GGUFCursor

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_MAX_DIMS: Final = 4
_DEFAULT_ALIGNMENT: Final = 32
_MAX_ALIGNMENT: Final = 1 << 20
# Smallest entries: empty key + type + one byte; empty name + no dims + type + offset.
_MIN_METADATA_BYTES: Final = 8 + 4 + 1
_MIN_TENSOR_BYTES: Final = 8 + 4 + 4 + 8


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One entry of the tensor table.

    Attributes:
        name: the GGUF name, for example `blk.0.attn_q.weight`.
        shape: row major, as torch has it (GGUF stores the fastest dimension first).
        type_id: GGML type id, see `GGMLType`.
        type_name: the name of that type, for example `Q4_K`.
        offset: of the first byte, from the start of the file.
        nbytes: size as stored.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    type_name: str
    offset: int
    nbytes: int


class GGUFFile:
    """Owns the mapping of one GGUF file.

    `metadata` maps keys to int, float, bool, str, numpy arrays, `list[str]`, or lists of these for
    nested arrays. `tensors` keeps the order of the file.

    Raises:
        WeightsError: the file is missing, damaged, truncated, big endian, of an unknown version,
            or holds a tensor of an unknown type. The message names the field or the tensor.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._map = _map_file(self.path)
        self._bytes: npt.NDArray[np.uint8] | None = np.frombuffer(self._map, np.uint8)
        try:
            cursor = GGUFCursor(self._map, self.path)
            self.version = _read_version(cursor)
            num_tensors = cursor.count("tensor count", _MIN_TENSOR_BYTES)
            num_entries = cursor.count("metadata count", _MIN_METADATA_BYTES)
            self.metadata = _read_metadata(cursor, num_entries)
            self.tensors = _read_tensors(cursor, num_tensors, self.metadata)
            _check_ranges(cursor, self.tensors)
        except BaseException:
            self.close()
            raise

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """The stored bytes of a tensor: a view of the mapping, copy-on-write, never of the disk.

        The view stays valid after `close()`; the mapping goes away with its last view.
        """
        if self._bytes is None:
            raise WeightsError(f"{self.path}: is closed, tensor {name!r} cannot be read")
        tensor = self.tensors.get(name)
        if tensor is None:
            raise WeightsError(f"{self.path}: has no tensor {name!r}")
        return self._bytes[tensor.offset : tensor.offset + tensor.nbytes]

    def release_pages(self) -> None:
        """Let go of all pages that were read; views stay valid and read them anew.

        The mapping is private and nobody writes to it, so that nothing is lost.
        """
        advice = getattr(mmap, "MADV_DONTNEED", None)
        if advice is not None and not self._map.closed:
            self._map.madvise(advice)

    def close(self) -> None:
        """Give up the mapping. Safe to call again."""
        self._bytes = None
        try:
            self._map.close()
        except BufferError:
            # A view is still alive: the mapping ends with it.
            return

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _map_file(path: Path) -> mmap.mmap:
    try:
        # Opening a pipe would wait for a writer.
        mode = path.stat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise WeightsError(f"{path}: is no regular file; give the path of a .gguf file")
        with path.open("rb") as file:
            if file.seek(0, 2) == 0:
                raise WeightsError(f"{path}: is empty; download it again")
            try:
                # Private and writable, because torch takes no read-only memory.
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            except OSError:
                # The system will not promise that much private memory; reading is enough.
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise WeightsError(f"{path}: cannot be opened: {error.strerror or error}") from error


def _read_version(cursor: GGUFCursor) -> int:
    magic = cursor.skip(4, "magic")
    if magic != _MAGIC:
        remedy = "it is not a GGUF file"
        if magic == b"vers":
            remedy = "it is a Git LFS pointer; fetch the real file with `git lfs pull`"
        cursor.fail("magic", f"is {magic!r} instead of {_MAGIC!r}: {remedy}")
    version = cursor.u32("version")
    if version not in _VERSIONS:
        if int.from_bytes(version.to_bytes(4, "little"), "big") in (1, *_VERSIONS):
            cursor.fail(
                "version",
                "the file is big endian; convert it with `gguf-convert-endian FILE little`",
            )
        cursor.fail("version", f"is {version}; versions 2 and 3 are read, convert the model again")
    return version


def _read_metadata(cursor: GGUFCursor, num_entries: int) -> dict[str, object]:
    metadata: dict[str, object] = {}
    for index in range(num_entries):
        key = cursor.string(f"key of metadata entry {index}")
        field = f"metadata {key!r}"
        if key in metadata:
            cursor.fail(field, "appears twice")
        metadata[key] = cursor.value(cursor.u32(f"{field} (type)"), field)
    return metadata


def _read_tensors(
    cursor: GGUFCursor, num_tensors: int, metadata: dict[str, object]
) -> dict[str, GGUFTensor]:
    alignment = _read_alignment(cursor, metadata)
    tensors: dict[str, GGUFTensor] = {}
    for index in range(num_tensors):
        tensor = _read_tensor(cursor, index, alignment)
        if tensor.name in tensors:
            cursor.fail(f"tensor {tensor.name!r}", "appears twice")
        tensors[tensor.name] = tensor
    # Offsets count from the first aligned byte behind the table, which is known only now.
    base = -(-cursor.position // alignment) * alignment
    return {
        name: GGUFTensor(
            name, entry.shape, entry.type_id, entry.type_name, base + entry.offset, entry.nbytes
        )
        for name, entry in tensors.items()
    }


def _read_alignment(cursor: GGUFCursor, metadata: dict[str, object]) -> int:
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if (
        not isinstance(alignment, int)
        or isinstance(alignment, bool)
        or not 0 < alignment <= _MAX_ALIGNMENT
        or alignment & (alignment - 1)
    ):
        cursor.fail(
            "metadata 'general.alignment'",
            f"is {shown(alignment)}, not a power of two up to {_MAX_ALIGNMENT}",
        )
    return alignment


def _read_tensor(cursor: GGUFCursor, index: int, alignment: int) -> GGUFTensor:
    """One table entry, with an offset that is still relative to the data section."""
    name = cursor.string(f"name of tensor entry {index}")
    field = f"tensor {name!r}"
    num_dims = cursor.u32(f"{field} (dimension count)")
    if not 1 <= num_dims <= _MAX_DIMS:
        cursor.fail(field, f"has {num_dims} dimensions; the format allows 1 to {_MAX_DIMS}")
    dims = [cursor.u64(f"{field} (dimension {axis})") for axis in range(num_dims)]
    if 0 in dims:
        cursor.fail(field, f"has an empty dimension: {dims}")
    type_id = cursor.u32(f"{field} (type)")
    offset = cursor.u64(f"{field} (offset)")
    try:
        ggml_type = GGMLType(type_id)
    except ValueError:
        cursor.fail(field, f"has unknown tensor type {type_id}; a newer cardan may read it")
    block = BLOCK_FORMATS[ggml_type]
    if dims[0] % block.elements:
        cursor.fail(
            field,
            f"has rows of {dims[0]}, not a multiple of the {block.elements} elements in a "
            f"{ggml_type.name} block",
        )
    if offset % alignment:
        cursor.fail(field, f"starts at offset {offset}, not a multiple of alignment {alignment}")
    nbytes = math.prod(dims) // block.elements * block.nbytes
    return GGUFTensor(name, tuple(reversed(dims)), type_id, ggml_type.name, offset, nbytes)


def _check_ranges(cursor: GGUFCursor, tensors: dict[str, GGUFTensor]) -> None:
    size = cursor.position + cursor.remaining
    previous: GGUFTensor | None = None
    for tensor in sorted(tensors.values(), key=lambda entry: entry.offset):
        field = f"tensor {tensor.name!r}"
        stop = tensor.offset + tensor.nbytes
        if stop > size:
            cursor.fail(
                field,
                f"spans bytes {tensor.offset} to {stop}, but the file has {size}; it is truncated "
                "or damaged, download it again",
            )
        if previous is not None and tensor.offset < previous.offset + previous.nbytes:
            cursor.fail(field, f"overlaps tensor {previous.name!r}")
        previous = tensor
