"""Typed access to the metadata of one GGUF file, for the builder of a model config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cardan.core.interfaces.errors import WeightsError
from cardan.core.types.errors import shown


class GGUFMetadata:
    """Reads keys below an architecture's prefix and refuses values of another type.

    Raises:
        WeightsError: names the key and what was expected.
    """

    def __init__(self, metadata: Mapping[str, object], architecture: str) -> None:
        self._metadata = metadata
        self._prefix = f"{architecture}."

    def array(self, key: str) -> np.ndarray[Any, Any] | None:
        """An array of numbers, or None if the key holds something else or is missing."""
        value = self._metadata.get(self._prefix + key)
        return value if isinstance(value, np.ndarray) else None

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer, required without a default; an array (by layer) must be uniform."""
        value = self.optional_integer(key)
        if value is None:
            value = default
        if value is None:
            raise WeightsError(f"metadata {self._prefix + key!r}: is missing")
        if value < 1:
            raise WeightsError(f"metadata {self._prefix + key!r}: is {value}, must be positive")
        return value

    def optional_integer(self, key: str) -> int | None:
        """An integer, or None if it is not given."""
        value = self._scalar(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise WeightsError(f"metadata {self._prefix + key!r}: {shown(value)} is not an integer")
        return value

    def number(self, key: str) -> float:
        """A required finite number."""
        value = self.optional_number(key)
        if value is None:
            raise WeightsError(f"metadata {self._prefix + key!r}: is missing")
        return value

    def optional_number(self, key: str) -> float | None:
        """A finite number, or None if it is not given."""
        value = self._scalar(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
            raise WeightsError(
                f"metadata {self._prefix + key!r}: {shown(value)} is not a finite number"
            )
        return float(value)

    def optional_string(self, key: str) -> str | None:
        """A string, or None if it is not given."""
        value = self._metadata.get(self._prefix + key)
        if value is not None and not isinstance(value, str):
            raise WeightsError(f"metadata {self._prefix + key!r}: {shown(value)} is not a string")
        return value

    def _scalar(self, key: str) -> object:
        value = self._metadata.get(self._prefix + key)
        if not isinstance(value, np.ndarray):
            return value
        distinct = np.unique(value)
        if distinct.size != 1:
            raise WeightsError(
                f"metadata {self._prefix + key!r}: layers differ ({distinct.size} values); "
                "models with uneven layers are not read from GGUF"
            )
        return distinct[0].item()
