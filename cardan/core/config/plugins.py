"""Which plugins may load."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginConfig:
    """Settings of plugin discovery.

    Attributes:
        required: plugins that must load; one that fails is an error, not a warning.
        blocked: plugins that must not load, by entry-point name.
        options: settings for plugins, by the names that they offer.
    """

    required: tuple[str, ...] = ()
    blocked: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)
