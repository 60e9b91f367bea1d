"""The HTTP edge."""

from dataclasses import dataclass, field

from cardan.core.config.engine_process import EngineProcessConfig


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
        engine_process: the process of the engine behind it.
        enable_log_requests: log each request's id, sizes and settings (never its text).
        root_path: path prefix when behind a proxy.
        max_body_bytes: largest request body accepted, bytes.
        receive_timeout: seconds that a request may take to arrive; one that arrives at 4 KiB/s or
            faster may take longer.
        send_timeout: seconds that a client may leave an answer unread before it is cut off.
        tool_call_parser: name of the parser that finds tool calls in answers; "auto": the one that
            knows the model's chat template; "none": answers have no calls.
        response_role: role of the answering chat message.
        enable_sleep_mode: serve ``/sleep``, ``/wake_up`` and ``/is_sleeping``.
        enable_page: serve the page at ``/`` and the live numbers and traces that it shows.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    api_keys: tuple[str, ...] = ()
    served_model_names: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    shutdown_timeout: float = 30.0
    engine_process: EngineProcessConfig = field(default_factory=EngineProcessConfig)
    enable_log_requests: bool = False
    root_path: str = ""
    max_body_bytes: int = 64 * 1024 * 1024
    receive_timeout: float = 30.0
    send_timeout: float = 300.0
    tool_call_parser: str = "auto"
    response_role: str = "assistant"
    enable_sleep_mode: bool = False
    enable_page: bool = True
