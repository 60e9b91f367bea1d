"""``cardan conformance``: does a platform keep the contract?"""

from typing import Annotated

import typer

from cardan.cli.console import EXIT_USAGE, print_error
from cardan.core.types.errors import ConfigError


def conformance(
    platform: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="Platform to examine: NAME, NAME:INDEX of a device, or MODULE:CLASS.",
            show_default=False,
        ),
    ],
    level: Annotated[
        list[str] | None,
        typer.Option("--level", metavar="L0,L3", help="Levels to run, or all (default: L0 to L5)."),
    ] = None,
    json_file: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write the results as JSON."),
    ] = None,
    markdown_file: Annotated[
        str | None,
        typer.Option("--markdown", metavar="FILE", help="Write the results as Markdown."),
    ] = None,
    badge_file: Annotated[
        str | None,
        typer.Option("--badge", metavar="FILE", help="Write a badge: FILE.svg, or FILE.json."),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option("--seed", min=0, help="Seed of all random inputs (default: a fresh one)."),
    ] = None,
    expression: Annotated[
        str | None,
        typer.Option("-k", metavar="EXPR", help="Run the tests whose names match only."),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Name every test and trace failures.")
    ] = False,
) -> int:
    """Examine a platform level by level. Exit code 0: nothing failed."""
    from cardan.testing.conformance.run import KitRun, join_levels, run_kit

    run = KitRun(
        spec=platform,
        levels=join_levels(level or ()),
        json_file=json_file,
        markdown_file=markdown_file,
        badge_file=badge_file,
        seed=seed,
        expression=expression,
        is_verbose=verbose,
    )
    try:
        return run_kit(run)
    except ConfigError as error:
        print_error(str(error), error)
        return EXIT_USAGE
