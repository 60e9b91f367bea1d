"""Which plugins may load."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginConfig:
    """Settings of plugin discovery.

    Attributes:
        required: plugins that must load; one that fails is an error, not a warning.
        blocked: plugins that must not load, by entry-point name.
    """

    required: tuple[str, ...] = ()
    blocked: tuple[str, ...] = ()
