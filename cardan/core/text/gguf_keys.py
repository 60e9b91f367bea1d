"""Typed reading of the ``tokenizer.ggml.*`` keys of a GGUF file."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cardan.core.text.errors import TextError
from cardan.core.types.errors import shown

_PREFIX = "tokenizer.ggml."


class GGUFKeys:
    """Reads keys below ``tokenizer.ggml.`` and refuses values of another type.

    Arrays come as NumPy arrays or lists. A key that is missing reads as empty, None or the default.

    Raises:
        TextError: names the key, what it holds and what was expected.
    """

    def __init__(self, metadata: Mapping[str, object]) -> None:
        self._metadata = metadata

    def strings(self, name: str) -> Sequence[str]:
        """A list of strings."""
        values = self._list(name)
        if not all(isinstance(value, str) for value in values):
            raise self._refuse(name, "a list of strings")
        return values

    def integers(self, name: str) -> Sequence[int]:
        """A list of whole numbers."""
        values = self._list(name)
        if not all(isinstance(value, int | float) and value == value // 1 for value in values):
            raise self._refuse(name, "a list of whole numbers")
        return [int(value) for value in values]

    def numbers(self, name: str) -> Sequence[float]:
        """A list of numbers, none of them NaN."""
        values = self._list(name)
        if not all(isinstance(value, int | float) and not math.isnan(value) for value in values):
            raise self._refuse(name, "a list of numbers")
        return values

    def text(self, name: str, default: str | None = None) -> str | None:
        """A string."""
        value = self._get(name)
        if value is not None and not isinstance(value, str):
            raise self._refuse(name, "a string")
        return default if value is None else value

    def flag(self, name: str, default: bool) -> bool:
        """True or false, which some writers store as a number."""
        value = self._get(name)
        if value is None:
            return default
        if not isinstance(value, int):
            raise self._refuse(name, "true or false")
        return bool(value)

    def token_id(self, name: str, num_tokens: int) -> int | None:
        """The id of one of ``num_tokens`` tokens."""
        value = self._get(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._refuse(name, "a token id")
        if not 0 <= value < num_tokens:
            raise TextError(f"{_PREFIX}{name} is {value}, but there are {num_tokens} tokens")
        return value

    def _get(self, name: str) -> object:
        return self._metadata.get(_PREFIX + name)

    def _list(self, name: str) -> list[Any]:
        value = self._get(name)
        if value is None:
            return []
        if isinstance(value, np.ndarray):
            return list(value.tolist())
        if not isinstance(value, list | tuple):
            raise self._refuse(name, "a list")
        return list(value)

    def _refuse(self, name: str, wanted: str) -> TextError:
        value = shown(self._get(name))
        return TextError(f"{_PREFIX}{name} is {value}, which is not {wanted}; the file is damaged")
