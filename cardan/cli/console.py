"""How commands talk on stderr, and the exit codes."""

import os
import sys
import traceback

from cardan.core.observability.logging import is_debugging

EXIT_OK = 0
EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def print_error(message: str, error: BaseException | None = None) -> None:
    """One red ``error:`` line (or what the message holds) on stderr; a traceback when debugging."""
    if error is not None and is_debugging():
        traceback.print_exception(error)
    print(f"{_paint('error:', '1;31')} {message}", file=sys.stderr)


def print_note(message: str) -> None:
    """A dim remark on stderr."""
    print(_paint(message, "2"), file=sys.stderr)


def usage_message(error: Exception) -> str | None:
    """What a command-line parser's error says, with the nearest right option; None if it is none.

    Typer carries its own copy of the parser or depends on one, by its version; both say the same.
    """
    describe = getattr(error, "format_message", None)
    if describe is None or not hasattr(error, "exit_code"):
        return None
    near = getattr(error, "possibilities", None)
    # The formatted message adds which parameter it is about, where there is one.
    is_about_one = getattr(error, "param", None) or getattr(error, "param_hint", None)
    message = str(describe() if is_about_one else getattr(error, "message", "") or describe())
    message = message.replace("Value error, ", "").rstrip(".")
    if near:
        message += f", did you mean {' or '.join(sorted(near))}?"
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "cardan"
    return f"{message} (see {path} --help)"


def _paint(text: str, style: str) -> str:
    if not sys.stderr.isatty() or os.environ.get("NO_COLOR"):
        return text
    return f"\x1b[{style}m{text}\x1b[0m"
