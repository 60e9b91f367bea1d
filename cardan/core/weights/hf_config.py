"""Reads the JSON configs in a Hugging Face model directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from cardan.core.interfaces.errors import WeightsError

# The index of a model with a million tensors is about as large.
_MAX_JSON_BYTES: Final = 128 << 20


def load_hf_config(directory: str | Path) -> dict[str, Any]:
    """Read `config.json`, and `generation_config.json` into its key `generation_config`.

    That key is absent if there is no such file. Nested configs, as multimodal models have them, are
    left as they are.

    Raises:
        WeightsError: `config.json` is missing, or one of the two is not a JSON object.
    """
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise WeightsError(
            f"{path}: is missing; a Hugging Face model directory has it next to its weights"
        )
    config = load_json_object(path)
    generation = Path(directory) / "generation_config.json"
    if generation.is_file():
        config["generation_config"] = load_json_object(generation)
    return config


def load_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Raises:
        WeightsError: it cannot be read, is not JSON, or holds something else.
    """
    try:
        nbytes = path.stat().st_size
        if nbytes > _MAX_JSON_BYTES:
            raise WeightsError(
                f"{path}: has {nbytes} bytes, more than such a file ever has ({_MAX_JSON_BYTES}); "
                "download it again"
            )
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path}: is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise WeightsError(f"{path}: must hold a JSON object, holds a {type(value).__name__}")
    return value
