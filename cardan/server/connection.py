"""One HTTP/1.1 connection: uvicorn's, less patient with what is slow, broken or in excess."""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from cardan.core.config.server import ServerConfig
from cardan.server.errors import ApiError

# Bytes of requests sent ahead of an answer that are taken in; more wait in the client's buffers.
_MAX_AHEAD = 64 * 1024
# Whoever sends slower than so many bytes a second may not take longer than `receive_timeout`.
_MIN_BYTES_PER_SECOND = 4096
# Seconds for a client to read why it was refused; what it sends meanwhile is thrown away.
_LINGER_SECONDS = 2.0


class Connection(H11Protocol):
    """Besides what uvicorn does:

    - a client that leaves is noticed also when it had sent ahead of its answer;
    - a request that comes too slowly ends with 408, and an answer that nobody reads is dropped;
    - a body that nobody wants is read, up to twice the limit, so that the answer can be seen;
    - refusals have the API's form of an error.
    """

    def __init__(self, *args: Any, settings: ServerConfig, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._settings = settings
        self._is_refused = False
        self._num_received = 0  # bytes of the request that is coming in
        self._num_unwanted = 0  # bytes of its body that came after the answer
        self._receive_start = 0.0
        self._receive_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None

    # -- events of the transport ---------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # The first request may be as late as a later one.
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._receive_timer, self._send_timer, self.timeout_keep_alive_task):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._num_received += len(data)
        if self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY:
            self._num_unwanted += len(data)
            if self._num_unwanted > 2 * self._settings.max_body_bytes + _MAX_AHEAD:
                self.transport.abort()
                return
        super().data_received(data)
        self._watch_input()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._send_timer = self.loop.call_later(self._settings.send_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    # -- events of a request -------------------------------------------------------------------

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_input()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP."""
        self._refuse(ApiError(400, "this is not a valid HTTP/1.1 request"))

    def _watch_input(self) -> None:
        """Keep the time of a request that is coming in, and reading open during an answer."""
        if self._is_receiving():
            if self._receive_timer is None:
                self._receive_start = self.loop.time()
                self._set_timer(self._settings.receive_timeout)
            return
        if self._receive_timer is not None:
            self._receive_timer.cancel()
            self._receive_timer = None
        self._num_received = self._num_unwanted = 0
        if self.flow.read_paused and len(self.conn.trailing_data[0]) <= _MAX_AHEAD:
            # Only who reads learns that the client is gone.
            self.flow.resume_reading()

    def _is_receiving(self) -> bool:
        """Whether a part of a request is here and the rest is not."""
        if self._is_refused or self.transport.is_closing():
            return False
        state = self.conn.their_state
        return state is h11.SEND_BODY or (state is h11.IDLE and bool(self.conn.trailing_data[0]))

    def _set_timer(self, delay: float) -> None:
        self._receive_timer = self.loop.call_later(delay, self._check_pace)

    def _check_pace(self) -> None:
        allowed = self._settings.receive_timeout + self._num_received / _MIN_BYTES_PER_SECOND
        left = self._receive_start + allowed - self.loop.time()
        if left > 0:
            self._set_timer(left)
        else:
            self._receive_timer = None
            self._refuse(ApiError(408, "the request did not arrive in time"))

    def _refuse(self, error: ApiError) -> None:
        """Send ``error`` unless an answer has begun, and close."""
        self._is_refused = True
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        answer = error.response()
        headers = [*answer.raw_headers, (b"connection", b"close")]
        for event in (
            h11.Response(status_code=error.status, headers=headers, reason=b"Refused"),
            h11.Data(data=bytes(answer.body)),
            h11.EndOfMessage(),
        ):
            if output := self.conn.send(event):
                self.transport.write(output)
        if self.cycle is not None and not self.cycle.response_complete:
            # The application sees a client that is gone.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        # Closed with input unread, the system would reset the connection and lose the answer.
        self.flow.resume_reading()
        self.transport.write_eof()
        self._send_timer = self.loop.call_later(_LINGER_SECONDS, self.transport.close)
