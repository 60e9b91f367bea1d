"""Exceptions of the contract."""

from cardan.core.types.errors import CardanError, ConfigError, InputError

__all__ = [
    "CardanError",
    "ConfigError",
    "InputError",
    "OutOfMemoryError",
    "PluginError",
    "UnsupportedError",
    "WeightsError",
]


class UnsupportedError(CardanError):
    """A device, backend or executor cannot do what was asked; the core takes another way.

    Raised with the reason as its only argument, which is shown to the user.
    """


class OutOfMemoryError(CardanError):
    """A pool or buffer did not fit; the message states needed, available and remedies."""


class PluginError(CardanError):
    """A plugin that was named, or that is needed, cannot be used."""


class WeightsError(CardanError, ValueError):
    """A checkpoint is truncated, incomplete, wrong or refused; the message names the tensor."""
