"""``cardan serve``: the HTTP server."""

import asyncio
import contextlib
import importlib
from functools import partial
from typing import TYPE_CHECKING

from cardan.cli.bootstrapping import import_bootstrap
from cardan.cli.console import EXIT_OK
from cardan.cli.options import engine_config
from cardan.cli.server_options import ServerOptions, server_config
from cardan.core.config.engine import EngineConfig
from cardan.core.config.server import ServerConfig
from cardan.core.observability.logging import configure_logging, is_debugging

if TYPE_CHECKING:
    import socket


def serve(options: ServerOptions) -> int:
    """Serve a model over HTTP, with OpenAI's API."""
    level = options.log_level or ("debug" if is_debugging() else "info")
    configure_logging(level, options.log_format)
    config, edge = engine_config(options), server_config(options)
    from cardan.core.discovery import Discovery
    from cardan.server.sockets import reserve_socket
    from cardan.server.tool_format import load_tool_format

    load_tool_format(edge.tool_call_parser, Discovery())  # a wrong name fails now, not later
    # An address that cannot be had is known before the model is loaded.
    with contextlib.closing(reserve_socket(edge)) as sock:
        asyncio.run(_serve(config, edge, sock))
    return EXIT_OK


async def _serve(config: EngineConfig, edge: ServerConfig, sock: "socket.socket") -> None:
    engine = await import_bootstrap()(
        config,
        in_process=False,
        process=edge.engine_process,
        meanwhile=partial(importlib.import_module, "cardan.server.run"),
    )
    from cardan.server.run import serve as serve_http

    try:
        await serve_http(engine, edge, sock)
    finally:
        await engine.close()
