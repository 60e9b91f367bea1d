"""The options of the server, and the configuration made from them."""

from dataclasses import dataclass
from typing import Annotated

from cardan.cli.options import EngineOptions, make_section, option
from cardan.core.config.engine_process import EngineProcessConfig
from cardan.core.config.server import ServerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions(EngineOptions):
    """What a user can say about the server besides."""

    host: Annotated[str | None, option("--host", help="Address. Default: 127.0.0.1.")] = None
    port: Annotated[
        int | None,
        option("--port", min=0, max=65535, help="TCP port. Default: 8000."),
    ] = None
    uds: Annotated[str | None, option("--uds", help="Listen on a Unix socket instead.")] = None
    api_key: Annotated[
        list[str] | None,
        option(
            "--api-key",
            envvar="CARDAN_API_KEY",
            help="Accepted key (several times; in the variable apart by spaces).",
        ),
    ] = None
    served_model_name: Annotated[
        list[str] | None,
        option(
            "--served-model-name",
            help="Name that answers to model (several times); replies use the first.",
        ),
    ] = None
    allowed_origins: Annotated[
        list[str] | None,
        option("--allowed-origins", help="Origin of browsers, CORS (several times)."),
    ] = None
    shutdown_timeout: Annotated[
        float | None,
        option(
            "--shutdown-timeout",
            min=0.0,
            help="Seconds that running requests get on a stop signal. Default: 30.",
        ),
    ] = None
    step_timeout: Annotated[
        float | None,
        option(
            "--step-timeout",
            min=1.0,
            help="Seconds without a finished step after which /health turns. Default: 60.",
        ),
    ] = None
    hang_timeout: Annotated[
        float | None,
        option(
            "--hang-timeout",
            min=1.0,
            help="Seconds without a finished step after which the engine is replaced. "
            "Default: 300.",
        ),
    ] = None
    max_engine_restarts: Annotated[
        int | None,
        option(
            "--max-engine-restarts",
            min=0,
            help="How often in ten minutes a dead or stuck engine is replaced. Default: 3.",
        ),
    ] = None
    engine_python: Annotated[
        str | None,
        option(
            "--engine-python",
            metavar="PATH",
            help="Interpreter of another virtual environment, with the platform, that the engine "
            "runs on. Default: this one.",
        ),
    ] = None
    tool_call_parser: Annotated[
        str | None,
        option(
            "--tool-call-parser",
            metavar="NAME",
            help="Form in which the model writes tool calls: hermes, llama3_json, one of a plugin, "
            "or none. Default: what its chat template tells.",
        ),
    ] = None
    enable_log_requests: Annotated[
        bool | None,
        option(
            "--enable-log-requests/--no-enable-log-requests",
            help="Log each request's id, sizes and settings, never its text.",
        ),
    ] = None
    enable_sleep_mode: Annotated[
        bool | None,
        option(
            "--enable-sleep-mode",
            help="Serve /sleep, /wake_up and /is_sleeping, which give the device's memory back "
            "and take it again.",
        ),
    ] = None
    enable_page: Annotated[
        bool | None,
        option(
            "--enable-page/--disable-page",
            help="The page at /: chat, live view, traces of requests. Default: enabled.",
        ),
    ] = None
    root_path: Annotated[str | None, option("--root-path", help="Path prefix behind a proxy.")] = (
        None
    )


def server_config(options: ServerOptions) -> ServerConfig:
    """The server's configuration."""
    return make_section(
        ServerConfig,
        host=options.host,
        port=options.port,
        uds=options.uds,
        api_keys=tuple(options.api_key or ()),
        served_model_names=tuple(options.served_model_name or ()),
        allowed_origins=tuple(options.allowed_origins or ()),
        shutdown_timeout=options.shutdown_timeout,
        engine_process=make_section(
            EngineProcessConfig,
            step_timeout=options.step_timeout,
            hang_timeout=options.hang_timeout,
            max_restarts=options.max_engine_restarts,
            python=options.engine_python,
        ),
        enable_log_requests=options.enable_log_requests,
        tool_call_parser=options.tool_call_parser,
        root_path=options.root_path,
        enable_sleep_mode=options.enable_sleep_mode,
        enable_page=options.enable_page,
    )
