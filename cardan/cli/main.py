"""The ``cardan`` command. Importing it loads neither torch nor NumPy nor rich."""

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from cardan.cli.bench import bench
from cardan.cli.conformance import conformance
from cardan.cli.console import (
    EXIT_ERROR,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_PIPE,
    EXIT_USAGE,
    flush_output,
    output_exit_code,
    print_error,
    usage_message,
)
from cardan.cli.diff import diff
from cardan.cli.doctor import doctor
from cardan.cli.eval import evaluation
from cardan.cli.expansion import with_options
from cardan.cli.options import EngineOptions
from cardan.cli.plan import plan
from cardan.cli.platforms import platforms
from cardan.cli.run import run
from cardan.cli.serve import serve
from cardan.cli.server_options import ServerOptions
from cardan.cli.version import cardan_version
from cardan.core.observability.logging import configure_logging
from cardan.core.types.errors import CardanError

app = typer.Typer(
    name="cardan",
    help="One LLM engine for any silicon.",
    add_completion=False,
    pretty_exceptions_enable=False,
    # The drawn panels cut long option names off on a terminal of 80 columns.
    rich_markup_mode=None,
    context_settings={
        "help_option_names": ["-h", "--help"],
        # Options may be spelled with underscores, too.
        "token_normalize_func": lambda word: word.replace("_", "-"),
    },
)
app.command(name="run")(with_options(EngineOptions)(run))
app.command(name="serve")(with_options(ServerOptions)(serve))
app.command(name="platforms")(platforms)
app.command(name="doctor")(with_options(EngineOptions)(doctor))
app.command(name="plan")(with_options(EngineOptions)(plan))
app.command(name="diff")(with_options(EngineOptions)(diff))
app.add_typer(bench)
app.add_typer(evaluation)
app.command(name="conformance")(conformance)


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"cardan {cardan_version()}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", "-V", callback=_show_version, is_eager=True, help="Show the version."
        ),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Log everything and show tracebacks.")
    ] = False,
) -> None:
    """One LLM engine for any silicon."""
    if debug:
        configure_logging("debug")
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    0: done; 1: it failed, stderr says why; 2: the command line is wrong; 130: interrupted;
    141: whoever read the output has closed the pipe.
    """
    code = _run(arguments)
    failure = flush_output()
    if failure is not None and code == EXIT_OK:
        return output_exit_code(failure) or EXIT_ERROR
    return code


def _run(arguments: Sequence[str] | None) -> int:
    try:
        result = app(
            args=list(sys.argv[1:] if arguments is None else arguments),
            prog_name="cardan",
            standalone_mode=False,
        )
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except CardanError as error:
        print_error(str(error), error)
        return EXIT_ERROR
    except SystemExit:  # of the command-line parser, when the pipe of its output was closed
        return EXIT_PIPE
    except OSError as error:
        code = output_exit_code(error)
        if code is None:
            raise
        return code
    except Exception as error:
        message = usage_message(error)
        if message is None:  # a defect: the traceback is the report
            raise
        print_error(message)
        return EXIT_USAGE
    return result if isinstance(result, int) else EXIT_OK
