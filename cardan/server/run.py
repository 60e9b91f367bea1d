"""Runs the HTTP server: its signals and its end."""

import asyncio
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

import uvicorn

from cardan.core.config.server import ServerConfig
from cardan.core.engine.serving import ServingEngine
from cardan.server.app import create_app
from cardan.server.connection import Connection
from cardan.server.context import served_names
from cardan.server.metrics import ServerMetrics
from cardan.server.sockets import BACKLOG, address_of, reserve_socket

logger = logging.getLogger(__name__)

# Longer than the idle time of usual clients and proxies, so that they close first.
_KEEP_ALIVE_SECONDS = 75
# Time for the last events of aborted requests to go out.
_FLUSH_SECONDS = 5
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class HttpServer:
    """One server on the running event loop."""

    def __init__(
        self,
        engine: ServingEngine,
        config: ServerConfig,
        sock: socket.socket,
        metrics: ServerMetrics | None = None,
    ) -> None:
        """Own ``sock``, a socket of `reserve_socket`; the engine stays the caller's."""
        if metrics is None:
            metrics = ServerMetrics(engine, served_names(config, engine.info)[0])
        app = create_app(engine, config, metrics)
        self._config = config
        self._sock = sock
        self._tracker = app.state.tracker
        self._drain: asyncio.Task[None] | None = None
        self._server = _Uvicorn(
            uvicorn.Config(
                app,
                http=partial(Connection, settings=config),  # type: ignore[arg-type]
                lifespan="off",
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=_FLUSH_SECONDS,
            )
        )

    async def run(self) -> None:
        """Serve until `stop` or a signal (SIGINT, SIGTERM), which both may come twice."""
        try:
            with self._signals():
                # Whoever waits for this line may interrupt at once.
                logger.info("ready at %s", address_of(self._config, self._sock))
                await self._server.serve(sockets=[self._sock])
        finally:
            if self._drain is not None:
                self._drain.cancel()
            self._sock.close()
            if self._config.uds:
                with suppress(OSError):
                    os.unlink(self._config.uds)

    def stop(self) -> None:
        """Turn new requests away and let running ones finish; called again, stop at once."""
        if self._drain is None:
            self._tracker.start_draining()
            self._drain = asyncio.get_running_loop().create_task(self._run_drain())
        else:
            logger.warning("stopping at once; %d requests are cut short", self._tracker.num_active)
            self._tracker.abort_all("this server was stopped")
            self._server.force_exit = True
            self._server.should_exit = True

    async def _run_drain(self) -> None:
        grace = self._config.shutdown_timeout
        if self._tracker.num_active:
            logger.info(
                "stopping: %d running requests get %g seconds; interrupt again to stop at once",
                self._tracker.num_active,
                grace,
            )
        if not await self._tracker.wait_idle(grace):
            logger.warning("%d requests did not finish in time", self._tracker.num_active)
            self._tracker.abort_all("this server is shutting down and could not wait any longer")
            await self._tracker.wait_idle(_FLUSH_SECONDS)
        self._server.should_exit = True

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Signals of the process call `stop`; only the main thread may take them."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)


async def serve(
    engine: ServingEngine,
    config: ServerConfig,
    sock: socket.socket | None = None,
    metrics: ServerMetrics | None = None,
) -> None:
    """Serve ``engine`` until a signal ends it.

    ``sock`` comes from `reserve_socket`; without one the address is taken now.

    Raises:
        ConfigError: the address cannot be used.
    """
    await HttpServer(engine, config, sock or reserve_socket(config), metrics).run()


class _Uvicorn(uvicorn.Server):
    """uvicorn without signal handling of its own: it would raise the signals again at the end."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
