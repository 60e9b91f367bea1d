"""Names, shapes and sizes of a model's tensors, from the heads of its files alone: no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cardan.core.interfaces.errors import WeightsError
from cardan.core.types.errors import shown
from cardan.core.weights.gguf_file import GGUFFile
from cardan.core.weights.gguf_names import FindPlugin, map_tensor_names, no_plugin
from cardan.core.weights.hf_config import load_json_object
from cardan.core.weights.resolve import ModelFiles

# What the safetensors library takes at most.
_MAX_HEADER_BYTES: Final = 100_000_000
_SINGLE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as a file stores it, under its Hugging Face name.

    ``form`` is the lower-case name of its type in the file: ``bf16``, ``f32``, ``q4_1``. Experts
    may be stacked along a first axis.
    """

    name: str
    shape: tuple[int, ...]
    form: str
    nbytes: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


def stored_tensors(files: ModelFiles, find: FindPlugin = no_plugin) -> tuple[StoredTensor, ...]:
    """All tensors of a model; none where a directory lacks safetensors files, or some of them.

    ``find`` knows plugins that read GGUF files by their architecture.

    Raises:
        WeightsError: a file is damaged, or holds tensors that have no place in its architecture.
    """
    if files.gguf is not None:
        return tuple(_of_gguf(files.gguf, find))
    paths = _safetensors_files(files.path)
    if not all(path.is_file() for path in paths):
        return ()
    return tuple(tensor for path in paths for tensor in _of_safetensors(path))


def _safetensors_files(directory: Path) -> list[Path]:
    """Those that a checkpoint consists of; others may lie beside them."""
    index = directory / _INDEX
    if index.is_file():
        named = load_json_object(index).get("weight_map")
        names = set(named.values()) if isinstance(named, dict) else set()
        if not all(isinstance(name, str) and name == Path(name).name for name in names):
            raise WeightsError(f"{index}: 'weight_map' must have plain file names")
        return [directory / name for name in sorted(names)]
    single = directory / _SINGLE
    return [single] if single.is_file() else sorted(directory.glob("*.safetensors"))


def _of_gguf(path: Path, find: FindPlugin) -> Iterator[StoredTensor]:
    with GGUFFile(path) as file:
        architecture = str(file.metadata["general.architecture"])
        try:
            sources = map_tensor_names(architecture, file.tensors, find)
        except WeightsError as error:
            raise WeightsError(f"{path}: {error}") from error
        for name, source in sources.items():
            entry = file.tensors[source.gguf_name]
            yield StoredTensor(name, entry.shape, entry.type_name.lower(), entry.nbytes)


def _of_safetensors(path: Path) -> Iterator[StoredTensor]:
    """The format: 8 bytes with the header's length, little endian, then the header in JSON, then
    the data, from whose start offsets count."""
    header, data_bytes = _header(path)
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            shape = tuple(int(size) for size in entry["shape"])
            start, stop = (int(offset) for offset in entry["data_offsets"])
            tensor = StoredTensor(name, shape, str(entry["dtype"]).lower(), stop - start)
        except (KeyError, TypeError, ValueError) as error:
            raise WeightsError(
                f"{path}: tensor {shown(name)}: its entry in the header is damaged; download the "
                "file again"
            ) from error
        if stop > data_bytes:
            raise WeightsError(
                f"{path}: tensor {shown(name)} ends at byte {stop} of the data, but the file has "
                f"{data_bytes} of them; it is truncated or damaged, download it again"
            )
        yield tensor


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """The header, and how many bytes follow it."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            text = file.read(length) if length <= _MAX_HEADER_BYTES else b""
            data_bytes = file.seek(0, 2) - 8 - length
        header = json.loads(text)
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise WeightsError(
            f"{path}: has no header of a safetensors file; download it again"
        ) from error
    if not isinstance(header, dict):
        raise WeightsError(f"{path}: has no header of a safetensors file; download it again")
    return header, data_bytes
