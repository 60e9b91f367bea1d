"""The HTTP edge."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of the HTTP server.

    Attributes:
        host: address to listen on.
        port: TCP port.
        uds: path of a Unix socket to listen on instead.
        api_keys: accepted bearer tokens; empty: no authentication.
        served_model_names: names that answer to ``model``; the first is used in replies. Empty:
            the model's own name.
        allowed_origins: origins that browsers may call from (CORS); empty: none.
        shutdown_timeout: seconds that running requests get to finish on a stop signal.
        step_timeout: seconds without progress after which the engine counts as stuck (health).
        hang_timeout: seconds without progress after which a stuck engine is replaced.
        max_engine_restarts: how often within ten minutes a dead or stuck engine is replaced.
        enable_log_requests: log each request's id, sizes and settings (never its text).
        root_path: path prefix when behind a proxy.
        max_body_bytes: largest request body accepted, bytes.
        receive_timeout: seconds that a request may take to arrive; one that arrives at 4 KiB/s or
            faster may take longer.
        send_timeout: seconds that a client may leave an answer unread before it is cut off.
        response_role: role of the answering chat message.
        enable_page: serve the page at ``/`` and the live numbers and traces that it shows.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    api_keys: tuple[str, ...] = ()
    served_model_names: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    shutdown_timeout: float = 30.0
    step_timeout: float = 60.0
    hang_timeout: float = 300.0
    max_engine_restarts: int = 3
    enable_log_requests: bool = False
    root_path: str = ""
    max_body_bytes: int = 64 * 1024 * 1024
    receive_timeout: float = 30.0
    send_timeout: float = 300.0
    response_role: str = "assistant"
    enable_page: bool = True
