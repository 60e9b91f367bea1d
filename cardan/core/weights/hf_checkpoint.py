"""A Hugging Face model directory with safetensors weights, whole or in shards."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open

from cardan.core.interfaces.errors import WeightsError
from cardan.core.types.errors import shown
from cardan.core.weights.file_pages import release_mapping
from cardan.core.weights.hf_config import load_hf_config, load_json_object
from cardan.core.weights.stacked_experts import ExpertPart, parts_of_stack, stack_names

_SINGLE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
_PICKLES: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class HFCheckpoint:
    """Reads `model.safetensors`, or the shards that `model.safetensors.index.json` names.

    Owns the mappings of its shards, each opened when its first tensor is asked for. Satisfies
    `Checkpoint`. Stacks of experts are seen expert by expert: see `stacked_experts`.

    Raises:
        WeightsError: files are missing, damaged, disagree with the index, or are pickles.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.config: Mapping[str, Any] = load_hf_config(self.directory)
        self._shards: dict[str, Any] = {}
        self._shard_names: dict[str, frozenset[str]] = {}
        # An address in the mapping of each shard that was read.
        self._addresses: dict[str, int] = {}
        self._file_of = self._locate_tensors()
        self._parts = self._part_stacks()

    def names(self) -> frozenset[str]:
        """The names of all tensors."""
        stacks = {part.stack for part in self._parts.values()}
        return frozenset(self._file_of).difference(stacks)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading its data."""
        part = self._parts.get(name)
        if part is not None:
            return part.stop - part.start, self._stored_shape(part.stack)[-1]
        return self._stored_shape(name)

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor, a view of the mapped file unless `dtype` is another type than the stored."""
        part = self._parts.get(name)
        if part is None:
            tensor = self._stored_tensor(name)
        else:
            tensor = self._stored_tensor(part.stack)[part.expert, part.start : part.stop]
        return tensor if dtype is None else tensor.to(dtype)

    def stored(self, name: str) -> None:
        """None: safetensors files hold no blocks of GGML."""
        self._file(name)

    def release_pages(self) -> None:
        """Let go of the pages that were read; tensors handed out stay valid."""
        for address in self._addresses.values():
            release_mapping(address)

    def describe(self, name: str) -> str:
        """The file that holds the tensor."""
        return self._file(name)

    def close(self) -> None:
        """Give up the mappings; tensors handed out stay valid. A later read opens them again."""
        self._shards.clear()
        self._addresses.clear()

    def _stored_tensor(self, name: str) -> torch.Tensor:
        shard = self._shard_with(name)
        try:
            tensor: torch.Tensor = shard.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise WeightsError(
                f"{self.directory / self._file_of[name]}: tensor {name!r}: {error}"
            ) from error
        if tensor.numel():
            self._addresses[self._file_of[name]] = tensor.data_ptr()
        return tensor

    def _stored_shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._shard_with(name).get_slice(name).get_shape())

    def _part_stacks(self) -> dict[str, ExpertPart]:
        """Puts the names of experts' parts in the place of their stacks' names."""
        parts: dict[str, ExpertPart] = {}
        for stack in list(stack_names(self._file_of)):
            found = parts_of_stack(stack, self._stored_shape(stack))
            parts |= found
            self._file_of |= dict.fromkeys(found, self._file_of[stack])
        return parts

    def _file(self, name: str) -> str:
        file = self._file_of.get(name)
        if file is None:
            raise WeightsError(f"{self.directory}: no safetensors file has a tensor {name!r}")
        return file

    def _shard_with(self, name: str) -> Any:
        file = self._file(name)
        shard = self._open(file)
        if name not in self._shard_names[file]:
            raise WeightsError(
                f"{self.directory / file}: has no tensor {name!r}, though {_INDEX} says so; "
                "download both again"
            )
        return shard

    def _open(self, file: str) -> Any:
        if file not in self._shards:
            path = self.directory / file
            try:
                with path.open("rb"):  # whose errors say more than the library's
                    shard: Any = safe_open(path, framework="pt")
            except PermissionError as error:
                raise WeightsError(f"{path}: cannot be opened: {error.strerror}") from error
            except (SafetensorError, OSError) as error:
                raise WeightsError(
                    f"{path}: is not a whole safetensors file ({error}); download it again"
                ) from error
            self._shards[file] = shard
            self._shard_names[file] = frozenset(shard.keys())
        return self._shards[file]

    def _locate_tensors(self) -> dict[str, str]:
        index = self.directory / _INDEX
        if index.is_file():
            return self._read_index(index)
        file = self._single_file()
        self._open(file)
        return dict.fromkeys(self._shard_names[file], file)

    def _single_file(self) -> str:
        # Opening a pipe would wait for a writer.
        found = self.directory.glob("*.safetensors")
        files = sorted(path.name for path in found if path.is_file())
        if _SINGLE in files:
            return _SINGLE
        if len(files) == 1:
            return files[0]
        if files:
            raise WeightsError(
                f"{self.directory}: has {len(files)} safetensors files ({', '.join(files[:3])}...) "
                f"but no {_INDEX} that says which tensor is in which; download it too"
            )
        pickles = sorted(path.name for kind in _PICKLES for path in self.directory.glob(kind))
        if pickles:
            raise WeightsError(
                f"{self.directory}: has weights as pickle only ({', '.join(pickles[:3])}), which "
                "can run code when it is loaded; convert to safetensors"
            )
        raise WeightsError(f"{self.directory}: has no safetensors weights; download them")

    def _read_index(self, index: Path) -> dict[str, str]:
        weight_map = load_json_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise WeightsError(f"{index}: 'weight_map' must be an object with an entry per tensor")
        for name, file in weight_map.items():
            # Names come from whoever published the model: they may not lead out of the directory.
            if not isinstance(file, str) or file != Path(file).name or "\0" in file:
                raise WeightsError(
                    f"{index}: tensor {shown(name)}: {shown(file)} is not a plain file name"
                )
        files = sorted(set(weight_map.values()))
        missing = [file for file in files if not os.path.isfile(self.directory / file)]
        if missing:
            raise WeightsError(
                f"{self.directory}: {len(missing)} of {len(files)} shards are missing "
                f"({', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}); download them"
            )
        return weight_map
