"""Where the result of a measuring command of ``cardan bench`` goes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from cardan.cli.console import EXIT_INTERRUPTED, EXIT_OK
from cardan.cli.values import parse_assignments
from cardan.core.types.errors import ConfigError

if TYPE_CHECKING:
    from cardan.bench.result import Result


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a result goes besides the terminal, and what the user writes on it."""

    json: Path | None
    append: Path | None
    label: str
    metadata: dict[str, str]

    def deliver(self, result: "Result") -> int:
        """Print and keep a result; the command's exit code."""
        from cardan.bench.result import append_result, save_result
        from cardan.bench.table import render_result

        typer.echo(render_result(result))
        if self.json is not None:
            save_result(result, self.json)
        if self.append is not None:
            append_result(result, self.append)
        return EXIT_INTERRUPTED if result.interrupted else EXIT_OK


def destination(
    json: Path | None, append: Path | None, label: str | None, metadata: list[str] | None
) -> Destination:
    """Check, before anything is measured, that the result can be kept."""
    from cardan.bench.result import check_writable

    with as_usage_error():
        for path in (json, append):
            if path is not None:
                check_writable(path)
    return Destination(json, append, label or "", parse_assignments(metadata))


@contextmanager
def as_usage_error() -> Iterator[None]:
    """A setting that cannot be is an error of the command line."""
    try:
        yield
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None
