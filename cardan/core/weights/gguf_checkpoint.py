"""A GGUF file as a checkpoint: Hugging Face names, shapes and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from cardan.core.interfaces.errors import WeightsError
from cardan.core.interfaces.quantization import StoredBlocks
from cardan.core.types.errors import shown
from cardan.core.types.ggml import BLOCK_TYPES, GGMLType
from cardan.core.weights.gguf_config import hf_config_from_gguf
from cardan.core.weights.gguf_dequant import PLAIN_DTYPES, dequantize
from cardan.core.weights.gguf_file import GGUFFile, GGUFTensor
from cardan.core.weights.gguf_names import (
    EXPERTS,
    ROPE_FREQS,
    FindPlugin,
    Stored,
    TensorSource,
    map_tensor_names,
    no_plugin,
)

_ROPE_SOURCE: Final = TensorSource(ROPE_FREQS, Stored.SAME)


class GGUFCheckpoint:
    """Reads one GGUF file; tensors equal those of the Hugging Face checkpoint it was made from.

    Owns the file's mapping. Satisfies `Checkpoint`. `rope_freqs.weight`, which no Hugging Face
    checkpoint has, can be read by that name if the file holds it but is not among `names()`: the
    config's `rope_scaling` says the same. `find` knows plugins by architecture.

    Raises:
        WeightsError: see `GGUFFile`, `hf_config_from_gguf` and `map_tensor_names`; also if the file
            is one part of several.
    """

    def __init__(self, path: str | Path, find: FindPlugin = no_plugin) -> None:
        self.file = GGUFFile(path)
        try:
            _check_whole(self.file)
            self.config: Mapping[str, Any] = hf_config_from_gguf(self.file, find)
            self._sources = _sources(self.file, self.config.get("num_experts"), find)
        except BaseException:
            self.file.close()
            raise

    def names(self) -> frozenset[str]:
        """The Hugging Face names of all tensors."""
        return frozenset(self._sources)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading its data."""
        return self._shape(self._source(name))

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor, decoded; a view of the mapped file where nothing has to be changed."""
        source = self._source(name)
        entry = self._entry(source)
        stored_dtype = PLAIN_DTYPES.get(GGMLType(entry.type_id), torch.float32)
        wanted = stored_dtype if dtype is None else dtype
        raw = self._raw(name, source)
        try:
            if source.stored is Stored.PLUS_ONE:
                # In float32, since the sum has lost nothing there yet.
                return (dequantize(raw, entry.type_id, entry.shape, torch.float32) - 1).to(wanted)
            return dequantize(raw, entry.type_id, self._shape(source), wanted)
        except WeightsError as error:
            raise WeightsError(f"{self.describe(name)}: {error}") from error

    def stored(self, name: str) -> StoredBlocks | None:
        """The blocks of a matrix: a view of the mapped file, or a copy if rows have to be moved."""
        source = self._source(name)
        entry = self._entry(source)
        format = entry.type_name.lower()
        shape = self._shape(source)
        if format not in BLOCK_TYPES or len(shape) != 2 or source.stored is Stored.PLUS_ONE:
            return None
        raw = self._raw(name, source)
        num_rows, in_features = shape
        # torch takes writable memory only.
        data = torch.from_numpy(raw if raw.flags.writeable else raw.copy())
        return StoredBlocks(format, in_features, data.view(num_rows, -1))

    def release_pages(self) -> None:
        """Let go of the pages that were read; tensors handed out stay valid."""
        self.file.release_pages()

    def describe(self, name: str) -> str:
        """The file and the name that the tensor has in it."""
        return f"{self.file.path.name}: tensor {self._source(name).gguf_name!r}"

    def close(self) -> None:
        """Give up the mapping; tensors handed out stay valid."""
        self.file.close()

    def _source(self, name: str) -> TensorSource:
        source = self._sources.get(name)
        if source is None and name == ROPE_FREQS and ROPE_FREQS in self.file.tensors:
            source = _ROPE_SOURCE
        if source is None:
            raise WeightsError(f"{self.file.path}: has no tensor for {name!r}")
        return source

    def _entry(self, source: TensorSource) -> GGUFTensor:
        return self.file.tensors[source.gguf_name]

    def _shape(self, source: TensorSource) -> tuple[int, ...]:
        shape = self._entry(source).shape
        return shape if source.expert is None else shape[1:]

    def _raw(self, name: str, source: TensorSource) -> npt.NDArray[np.uint8]:
        """The stored bytes, rows in the order that Hugging Face checkpoints have."""
        raw = self.file.raw(source.gguf_name)
        if source.expert is not None:
            size = len(raw) // self._entry(source).shape[0]
            return raw[source.expert * size : (source.expert + 1) * size]
        if source.stored in (Stored.SAME, Stored.PLUS_ONE):
            return raw
        num_rows = self._entry(source).shape[0]
        try:
            return _deinterleave_rows(raw, num_rows, self._num_heads(source.stored))
        except WeightsError as error:
            raise WeightsError(f"{self.describe(name)}: {error}") from error

    def _num_heads(self, stored: Stored) -> int:
        key = "num_key_value_heads" if stored is Stored.INTERLEAVED_KEY else "num_attention_heads"
        num_heads: int = self.config[key]
        return num_heads


def _check_whole(file: GGUFFile) -> None:
    parts = file.metadata.get("split.count", 1)
    if not isinstance(parts, int) or parts not in (0, 1):
        raise WeightsError(
            f"{file.path}: metadata 'split.count': the model is split into {shown(parts)} files; "
            "join them with `llama-gguf-split --merge FIRST_FILE OUTPUT_FILE`"
        )


def _sources(file: GGUFFile, num_experts: int | None, find: FindPlugin) -> dict[str, TensorSource]:
    try:
        mapped = map_tensor_names(str(file.metadata["general.architecture"]), file.tensors, find)
        sources: dict[str, TensorSource] = {}
        for name, source in mapped.items():
            if EXPERTS in name:
                sources |= _sources_of_experts(file, name, source, num_experts)
            else:
                sources[name] = source
        return sources
    except WeightsError as error:
        raise WeightsError(f"{file.path}: {error}") from error


def _sources_of_experts(
    file: GGUFFile, name: str, stack: TensorSource, num_experts: int | None
) -> dict[str, TensorSource]:
    """The tensors of a stack by the names of single experts."""
    shape = file.tensors[stack.gguf_name].shape
    if len(shape) != 3 or shape[0] != num_experts:
        raise WeightsError(
            f"tensor {stack.gguf_name!r}: has shape {shape}, not those of {num_experts} experts "
            "one after the other"
        )
    layer, _, projection = name.partition(EXPERTS)
    return {
        f"{layer}{EXPERTS}{expert}.{projection}": replace(stack, expert=expert)
        for expert in range(num_experts)
    }


def _deinterleave_rows(
    raw: npt.NDArray[np.uint8], num_rows: int, num_heads: int
) -> npt.NDArray[np.uint8]:
    """Put the rows of every head back into two halves.

    Rows are moved as stored: a quantised block never spans two rows.
    """
    if num_rows % (2 * num_heads):
        raise WeightsError(f"{num_rows} rows do not make {num_heads} heads of an even size")
    pairs = raw.reshape(num_heads, num_rows // num_heads // 2, 2, -1)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(-1)
