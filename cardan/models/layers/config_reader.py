"""Typed reading of a model's ``config.json``, with errors that name the key."""

import sys
from collections.abc import Mapping
from typing import Any

from cardan.core.interfaces.errors import ConfigError
from cardan.core.types.errors import shown

# An integer may be larger than any float.
_LARGEST = sys.float_info.max


class ConfigReader:
    """Reads a mapping shaped like ``config.json``. A key that is null counts as missing.

    Every method takes a default; without one the key must be there.

    Args:
        config: the mapping.
        path: where the mapping lies within the whole config, for messages.

    Raises:
        ConfigError: a key is missing or holds a value of the wrong type or range.
    """

    def __init__(self, config: Mapping[str, Any], path: str = "") -> None:
        self._config = config
        self._path = path

    def __contains__(self, key: str) -> bool:
        return self._config.get(key) is not None

    def where(self, key: str) -> str:
        """The key as messages show it."""
        return f"config.json: '{self._path}.{key}'" if self._path else f"config.json: '{key}'"

    def refuse(self, key: str, why: str) -> ConfigError:
        """The error for a value that cannot be honoured; the caller raises it."""
        return ConfigError(f"{self.where(key)} is {shown(self._config.get(key))}: {why}")

    def names(self) -> tuple[str, ...]:
        """Keys that hold something."""
        return tuple(key for key in self._config if key in self)

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.refuse(key, "must be a positive integer")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """An integer that may be 0."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.refuse(key, "must be an integer that is not negative")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive, finite number."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(key, "must be a number")
        if not 0 < value <= _LARGEST:
            raise self.refuse(key, "must be positive and finite")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """A positive, finite number, or None."""
        return self.number(key) if key in self else None

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.refuse(key, "must be true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.refuse(key, "must be a string")
        return value

    def texts(self, key: str) -> tuple[str, ...] | None:
        """A list of strings, or None."""
        value = self._config.get(key)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise self.refuse(key, "must be a list of strings")
        return tuple(value)

    def counts(self, key: str) -> tuple[int, ...]:
        """A list of integers that are not negative; empty if it is missing."""
        value = self._config.get(key)
        if value is None:
            return ()
        if not isinstance(value, list | tuple) or not all(
            isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value
        ):
            raise self.refuse(key, "must be a list of integers that are not negative")
        return tuple(value)

    def section(self, key: str) -> "ConfigReader | None":
        """A nested object, or None."""
        value = self._config.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.refuse(key, "must be an object")
        return ConfigReader(value, f"{self._path}.{key}" if self._path else key)

    def merged(self, defaults: Mapping[str, Any]) -> "ConfigReader":
        """This section with ``defaults`` for the keys that it lacks."""
        present = {key: value for key, value in self._config.items() if value is not None}
        return ConfigReader({**defaults, **present}, self._path)

    def _get(self, key: str, default: Any) -> Any:
        value = self._config.get(key)
        if value is not None:
            return value
        if default is None:
            raise ConfigError(f"{self.where(key)} is missing; the model cannot be built without it")
        return default
