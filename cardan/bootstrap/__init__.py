"""The only place that wires parts together. Importing it is light; torch comes with an engine."""

from cardan.bootstrap.front import open_async_engine, open_client

__all__ = ["open_async_engine", "open_client"]
