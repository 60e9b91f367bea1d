"""One end of the socket between an executor and one of its ranks."""

import contextlib
import select
import socket
import time

_LENGTH_BYTES = 4


class RankChannel:
    """Sends and receives frames: their length (4 bytes, little endian) and a body."""

    def __init__(self, sock: socket.socket, patience_s: float | None = None) -> None:
        """``patience_s``: how long the peer may take no message; None: forever."""
        sock.settimeout(patience_s)
        self._sock = sock
        self._patience_s = patience_s

    def send(self, body: bytes, timeout_s: float | None = None) -> None:
        """``timeout_s`` replaces what the peer may take.

        Raises:
            OSError: the peer is gone, or took nothing for as long as it may.
        """
        if timeout_s is not None:
            self._sock.settimeout(timeout_s)
        try:
            self._sock.sendall(len(body).to_bytes(_LENGTH_BYTES, "little") + body)
        finally:
            if timeout_s is not None:
                self._sock.settimeout(self._patience_s)

    def receive(self, timeout_s: float | None = None) -> bytes | None:
        """The next frame; None when the peer is gone.

        Raises:
            TimeoutError: it did not come in time.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        header = self._read(_LENGTH_BYTES, until)
        return None if header is None else self._read(int.from_bytes(header, "little"), until)

    def is_gone(self, timeout_s: float | None) -> bool:
        """Whether the peer closes its end within the time, looking at nothing it sends."""
        poll = select.poll()
        poll.register(self._sock, select.POLLHUP)
        return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))

    def has_input(self) -> bool:
        """Whether ``receive`` would return at once."""
        return bool(select.select([self._sock], [], [], 0)[0])

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the peer may have been first
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _read(self, count: int, until: float | None) -> bytes | None:
        buffer = bytearray(count)
        view = memoryview(buffer)
        try:
            while view:
                left = None if until is None else max(0.001, until - time.monotonic())
                self._sock.settimeout(left)
                received = self._sock.recv_into(view)
                if not received:
                    return None
                view = view[received:]
        except TimeoutError:
            raise
        except OSError:
            return None
        finally:
            self._sock.settimeout(self._patience_s)
        return bytes(buffer)
