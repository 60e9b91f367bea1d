"""A metrics sink: what the engine counts goes to a StatsD server, a datagram for each step."""

import contextlib
import socket
from collections.abc import Mapping
from typing import Any, ClassVar

from cardan.core.interfaces.hooks import hookimpl
from cardan.core.types.outputs import EngineStats

OPTION = "statsd.address"
_GAUGES = ("num_running", "num_waiting", "kv_usage")
_COUNTERS = ("num_steps", "num_batched_tokens", "num_preemptions", "prefix_queries", "prefix_hits")


class StatsdSink:
    """Sends once ``--plugin-option statsd.address=HOST:PORT`` says where to; silent without it.

    One for an engine. Datagrams that the network does not take at once are lost: the engine never
    waits for its meters.
    """

    contract: ClassVar[tuple[int, int]] = (1, 0)

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._num_sent = 0

    @hookimpl
    def cardan_cli_options(self) -> Mapping[str, str]:
        return {OPTION: "HOST:PORT of a StatsD server that gets the engine's numbers over UDP"}

    @hookimpl
    def cardan_engine_starting(self, options: Mapping[str, str]) -> None:
        if OPTION not in options:
            return
        host, colon, port = options[OPTION].rpartition(":")
        if not colon or not port.isdecimal():
            raise ValueError(f"{OPTION} is {options[OPTION]!r}, must be HOST:PORT")
        self._close()
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = found[0]
        self._socket = socket.socket(family, kind, protocol)
        self._socket.setblocking(False)
        self._socket.connect(address)

    @hookimpl
    def cardan_step_completed(self, stats: EngineStats) -> None:
        if self._socket is None:
            return
        lines = [f"cardan.{name}:{getattr(stats, name)}|g" for name in _GAUGES]
        counted = ((name, getattr(stats, name)) for name in _COUNTERS)
        lines += [f"cardan.{name}:{count}|c" for name, count in counted if count]
        with contextlib.suppress(OSError):
            self._socket.send("\n".join(lines).encode())
            self._num_sent += 1

    @hookimpl
    def cardan_metrics(self) -> Mapping[str, Any]:
        return {"statsd_datagrams": self._num_sent}

    @hookimpl
    def cardan_engine_stopped(self) -> None:
        self._close()

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
