"""``cardan diff``: where one platform's numbers leave those of another."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cardan.cli.bootstrapping import import_bootstrap
from cardan.cli.console import EXIT_ERROR, EXIT_OK, print_note
from cardan.cli.options import EngineOptions, engine_config, option
from cardan.core.observability.logging import configure_logging, is_debugging

if TYPE_CHECKING:
    from cardan.core.config.engine import EngineConfig
    from cardan.diff.run import DiffOptions


def diff(
    options: EngineOptions,
    against: Annotated[
        str, typer.Option("--against", metavar="NAME[:0]", help="The platform to be right.")
    ] = "cpu",
    requests: Annotated[
        Path | None,
        option(
            "--requests",
            metavar="FILE",
            help="Request bodies, one JSON object a line. Default: three short prompts.",
        ),
    ] = None,
    max_tokens: Annotated[
        int,
        typer.Option("--max-tokens", min=1, help="Tokens of each answer, unless its body says."),
    ] = 4,
    logprob_tolerance: Annotated[
        float | None,
        option(
            "--logprob-tolerance",
            min=0.0,
            help="Accepted difference of log-probabilities. Default: by the model's dtype.",
        ),
    ] = None,
    unchecked: Annotated[
        bool,
        typer.Option(
            "--unchecked", help="Watch kernels that fail their self-check, too, not the reference."
        ),
    ] = False,
    save: Annotated[
        Path | None,
        option("--save", metavar="DIR", help="Save the first call out of tolerance, to replay it."),
    ] = None,
    replay: Annotated[
        Path | None,
        option(
            "--replay",
            metavar="DIR",
            help="Run a saved call alone, on --platform or where it comes from. Needs no MODEL.",
        ),
    ] = None,
    json_file: Annotated[
        Path | None, option("--json", metavar="FILE", help="Write everything as JSON, too.")
    ] = None,
) -> int:
    """Run the same requests on two platforms; find the first operation out of tolerance.

    Exit code 0: equal, 1: different, 2: the command line is wrong, 130: interrupted.
    """
    level = options.log_level or ("debug" if is_debugging() else "warning")
    configure_logging(level, options.log_format)
    _check_writable(save, json_file)
    if replay is not None:
        return _replay(replay, options.platform)
    if options.platform is None:
        raise typer.BadParameter("which platform? Name the one to examine with --platform")
    chosen = _options(requests, max_tokens, logprob_tolerance, unchecked)
    return _compare(engine_config(options), against, chosen, save, json_file)


def _options(
    requests: Path | None, max_tokens: int, logprob_tolerance: float | None, unchecked: bool
) -> "DiffOptions":
    import_bootstrap()
    from cardan.diff.requests import DEFAULT_REQUESTS, read_requests
    from cardan.diff.run import DiffOptions

    return DiffOptions(
        requests=read_requests(requests) if requests is not None else DEFAULT_REQUESTS,
        max_tokens=max_tokens,
        logprob_tolerance=logprob_tolerance,
        unchecked=unchecked,
    )


def _compare(
    config: "EngineConfig",
    against: str,
    options: "DiffOptions",
    save: Path | None,
    json_file: Path | None,
) -> int:
    from rich.console import Console

    from cardan.cli.diff_report import diff_fields, print_diff
    from cardan.diff.run import run_diff
    from cardan.diff.saved_call import save_call

    # Pins are of one platform's kernels and backends; the reference has its own.
    reference = config.with_value("device.platform", against)
    if against != config.device.platform:
        reference = reference.with_value("device.kernels", ())
        reference = reference.with_value("device.attention_backend", None)
    result = run_diff(config, reference, options, print_note)
    if save is not None and result.calls.first is not None:
        save_call(result, result.calls.first, save)
        print_note(f"saved the first call out of tolerance: cardan diff --replay {save}")
    if json_file is not None:
        json_file.write_text(json.dumps(diff_fields(result), indent=2) + "\n", encoding="utf-8")
    print_diff(Console(highlight=False), result)
    return EXIT_OK if result.is_equal else EXIT_ERROR


def _replay(directory: Path, platform: str | None) -> int:
    import_bootstrap()
    from rich.console import Console

    from cardan.cli.diff_report import print_replay
    from cardan.diff.replay import replay
    from cardan.diff.saved_call import load_call

    call = load_call(directory)
    result = replay(call, platform)
    print_replay(Console(highlight=False), call, result)
    return EXIT_OK if result.is_equal else EXIT_ERROR


def _check_writable(save: Path | None, json_file: Path | None) -> None:
    """Before anything is run."""
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise typer.BadParameter(f"--json {json_file}: there is no such directory; make it first")
    if save is not None and save.exists() and not save.is_dir():
        raise typer.BadParameter(f"--save {save}: is a file; name a directory")
