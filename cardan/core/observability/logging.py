"""Log output of cardan's processes. Libraries log under ``cardan``; only an application calls
``configure_logging``.

Prompts and answers are never logged. A record about one request carries its id as
``extra={"request_id": ...}``.
"""

import json
import logging
import sys
import time
from typing import Literal, TextIO

from cardan.core.types.errors import ConfigError

ROOT = "cardan"
LEVELS: tuple[str, ...] = ("debug", "info", "warning", "error", "critical")
LogFormat = Literal["auto", "rich", "plain", "json"]
FORMATS: tuple[str, ...] = ("auto", "rich", "plain", "json")


class PlainFormatter(logging.Formatter):
    """``time LEVEL logger: message [request_id]``, times in UTC."""

    converter = staticmethod(time.gmtime)

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%SZ")

    def formatMessage(self, record: logging.LogRecord) -> str:
        return super().formatMessage(record) + _suffix(record)


class RichFormatter(logging.Formatter):
    """The message and the request id; the terminal handler draws time and level itself."""

    def __init__(self) -> None:
        super().__init__("%(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        return super().formatMessage(record) + _suffix(record)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ``time`` (seconds since the epoch), ``level``, ``logger``,
    ``message``, and ``request_id`` and ``error`` where there are any."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        request_id = getattr(record, "request_id", None)
        if request_id is not None:
            fields["request_id"] = str(request_id)
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


def configure_logging(
    level: str = "info", log_format: LogFormat = "auto", stream: TextIO | None = None
) -> None:
    """Send cardan's log records to ``stream`` (default: stderr); a second call replaces the first.

    ``auto`` is ``rich`` on a terminal and ``plain`` elsewhere.

    Raises:
        ConfigError: an unknown level or format.
    """
    if level.lower() not in LEVELS:
        raise ConfigError(f"log level {level!r} is none of {', '.join(LEVELS)}")
    if log_format not in FORMATS:
        raise ConfigError(f"log format {log_format!r} is none of {', '.join(FORMATS)}")
    target = sys.stderr if stream is None else stream
    if log_format == "auto":
        log_format = "rich" if target.isatty() else "plain"
    root = logging.getLogger(ROOT)
    reset_logging()
    handler = _handler(log_format, target)
    handler.set_name(ROOT)
    root.addHandler(handler)
    root.setLevel(level.upper())
    root.propagate = False


def reset_logging() -> None:
    """Undo ``configure_logging``: records go to whatever the application has set up."""
    root = logging.getLogger(ROOT)
    for handler in [item for item in root.handlers if item.get_name() == ROOT]:
        root.removeHandler(handler)
        handler.close()
    root.setLevel(logging.NOTSET)
    root.propagate = True


def is_debugging() -> bool:
    """Whether details for developers, such as tracebacks, are to be shown."""
    return logging.getLogger(ROOT).isEnabledFor(logging.DEBUG)


def _handler(log_format: LogFormat, stream: TextIO) -> logging.Handler:
    if log_format == "rich":
        from rich.console import Console
        from rich.logging import RichHandler

        rich_handler = RichHandler(
            console=Console(file=stream),
            show_path=False,
            markup=False,
            log_time_format="%H:%M:%S",
        )
        rich_handler.setFormatter(RichFormatter())
        return rich_handler
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if log_format == "json" else PlainFormatter())
    return handler


def _suffix(record: logging.LogRecord) -> str:
    request_id = getattr(record, "request_id", None)
    return "" if request_id is None else f" [{request_id}]"
