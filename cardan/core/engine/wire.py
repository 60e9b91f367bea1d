"""Messages as bytes: a frame is length (4 bytes, little endian), kind (1 byte), msgpack body."""

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import msgspec

from cardan.core.engine.messages import (
    Abort,
    Answered,
    Beat,
    Failed,
    Outputs,
    Ready,
    ResetPrefixCache,
    Shutdown,
    Sleep,
    Submit,
    Wake,
)

_KINDS: tuple[type[Any], ...] = (
    Submit,
    Abort,
    ResetPrefixCache,
    Shutdown,
    Ready,
    Failed,
    Outputs,
    Beat,
    Sleep,
    Wake,
    Answered,
)
_HEADER = struct.Struct("<IB")


class Connection:
    """One end of a stream socket. Sending is safe from any thread; one thread receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._encoder = msgspec.msgpack.Encoder()
        self._decoders = [msgspec.msgpack.Decoder(kind) for kind in _KINDS]
        self._sending = threading.Lock()

    def send(self, message: object) -> None:
        """Raises OSError when the peer is gone."""
        body = self._encoder.encode(message)
        frame = _HEADER.pack(len(body), _KINDS.index(type(message))) + body
        with self._sending:
            self._sock.sendall(frame)

    def receive(self) -> Iterator[Any]:
        """Messages until the peer is gone."""
        while (header := self._read(_HEADER.size)) is not None:
            length, kind = _HEADER.unpack(header)
            body = self._read(length)
            if body is None:
                return
            yield self._decoders[kind].decode(body)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the peer may have been first
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _read(self, count: int) -> bytes | None:
        buffer = bytearray(count)
        view = memoryview(buffer)
        while view:
            try:
                received = self._sock.recv_into(view)
            except OSError:
                return None
            if not received:
                return None
            view = view[received:]
        return bytes(buffer)
