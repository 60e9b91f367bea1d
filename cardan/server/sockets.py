"""The address that the server listens on, taken early. Imports nothing heavy."""

import errno
import os
import socket
import stat

from cardan.core.config.server import ServerConfig
from cardan.core.types.errors import ConfigError

BACKLOG = 2048


def reserve_socket(config: ServerConfig) -> socket.socket:
    """A listening socket at the configured address, to be taken before anything heavy starts.

    Early clients wait in its backlog until the server runs.

    Raises:
        ConfigError: the address is taken, not allowed or does not exist.
    """
    where = config.uds or f"port {config.port} on {config.host}"
    try:
        return _unix_socket(config.uds) if config.uds else _tcp_socket(config.host, config.port)
    except OSError as error:
        raise ConfigError(f"cannot listen on {where}: {_reason(error)}") from None


def _tcp_socket(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        # Only a listening socket keeps others from the port.
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


def _unix_socket(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        sock.bind(path)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


def _remove_stale(path: str) -> None:
    """Remove a socket file that nobody listens on."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)


def _reason(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return "the host name is unknown; give an address of this machine with --host"
    if error.errno == errno.EADDRINUSE:
        return "it is in use; choose another with --port (or --uds), or stop what holds it"
    if error.errno in (errno.EACCES, errno.EPERM):
        return "permission denied; choose a port above 1023 or a directory you may write to"
    if error.errno == errno.EADDRNOTAVAIL:
        return "this machine has no such address; use --host 0.0.0.0 for all it has"
    return f"{error.strerror or error}; choose another address with --port, --host or --uds"


def address_of(config: ServerConfig, sock: socket.socket) -> str:
    if config.uds:
        return f"unix:{config.uds}"
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
