"""How commands talk on stderr, and the exit codes."""

import contextlib
import errno
import os
import sys
import traceback
from typing import TextIO

from cardan.core.observability.logging import is_debugging

EXIT_OK = 0
EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
# What a shell reports of a command that a closed pipe ended.
EXIT_PIPE = 141

_NO_PLACE = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO, errno.EFBIG}
)


def print_error(message: str, error: BaseException | None = None) -> None:
    """One red ``error:`` line (or what the message holds) on stderr; a traceback when debugging."""
    # Whoever closed stderr, or let its disk run full, does without.
    with contextlib.suppress(OSError):
        if error is not None and is_debugging():
            traceback.print_exception(error)
        print(f"{_paint('error:', '1;31')} {message}", file=sys.stderr)


def print_note(message: str) -> None:
    """A dim remark on stderr."""
    with contextlib.suppress(OSError):
        print(_paint(message, "2"), file=sys.stderr)


def output_exit_code(error: OSError) -> int | None:
    """Say that output could not be written; the exit code, or None if it was about another thing.

    A pipe that its reader has closed is no failure to speak of.
    """
    if error.errno == errno.EPIPE:
        return EXIT_PIPE
    if error.errno not in _NO_PLACE:
        return None
    where = error.filename or "the output"
    print_error(f"cannot write {where}: {error.strerror}; make room, or write elsewhere", error)
    return EXIT_ERROR


def flush_output() -> OSError | None:
    """Write out what stdout and stderr hold; returns why stdout cannot be written.

    A stream that fails is pointed at the null device: the interpreter flushes once more at exit,
    and would change the exit code.
    """
    failure = None
    streams: tuple[TextIO | None, ...] = (sys.stdout, sys.stderr)  # None where one was closed
    for stream in streams:
        if stream is None or stream.closed:
            continue
        try:
            stream.flush()
        except OSError as error:
            failure = error if stream is sys.stdout else failure
            with contextlib.suppress(OSError):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, stream.fileno())
                os.close(null)
    return failure


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
