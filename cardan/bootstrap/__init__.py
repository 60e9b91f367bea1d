"""The only place that wires parts together. Importing it is light: what an engine's process imports
of it does without the front, and torch comes with an engine."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cardan.bootstrap.front import open_async_engine, open_client

__all__ = ["open_async_engine", "open_client"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from cardan.bootstrap import front

        return getattr(front, name)
    raise AttributeError(f"module {__name__} has no attribute {name}")
