"""The door from commands to the engine; going through it is what loads the heavy parts."""

from typing import TYPE_CHECKING

from cardan.core.types.errors import ConfigError

if TYPE_CHECKING:
    from cardan.cli.engine_protocol import OpenEngine


def import_bootstrap() -> "OpenEngine":
    """Import the engine.

    Raises:
        ConfigError: torch, which every platform brings, is not installed.
    """
    try:
        from cardan.bootstrap import open_async_engine
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ConfigError(
            "torch is not installed: install a platform, for instance pip install 'cardan[cpu]'"
        ) from error
    return open_async_engine
