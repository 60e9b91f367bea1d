"""``cardan bench``: measure an engine or a server, keep the result, compare and draw it."""

from pathlib import Path
from typing import Annotated

import typer

from cardan.cli.bench_offline import latency, startup, throughput
from cardan.cli.bench_options import (
    LatencyBenchOptions,
    ServeBenchOptions,
    StartupBenchOptions,
    ThroughputBenchOptions,
)
from cardan.cli.bench_output import as_usage_error
from cardan.cli.bench_serve import serve
from cardan.cli.console import EXIT_OK
from cardan.cli.expansion import with_options

bench = typer.Typer(
    name="bench",
    help="Measure an engine or a server; compare and plot results.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
bench.command(name="latency")(with_options(LatencyBenchOptions)(latency))
bench.command(name="throughput")(with_options(ThroughputBenchOptions)(throughput))
bench.command(name="startup")(with_options(StartupBenchOptions)(startup))
bench.command(name="serve")(with_options(ServeBenchOptions)(serve))

Files = Annotated[list[Path], typer.Argument(metavar="FILE...", help="Results of cardan bench.")]


@bench.command(name="compare")
def compare(
    files: Files,
    metric: Annotated[
        list[str] | None,
        typer.Option("--metric", help="Only this figure (several times).", show_default=False),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Compare what has different configurations, too.")
    ] = False,
) -> int:
    """Compare results with those of the first file.

    All results of a file are repeats of one thing.
    """
    from cardan.bench.compare import compare as compare_results
    from cardan.bench.compare import differences, render_comparison
    from cardan.bench.result import load_results

    if len(files) < 2:
        raise typer.BadParameter("compare needs two files or more; the first is the base")
    runs = [load_results(path) for path in files]
    base, *others = runs
    names = [results[0].label or path.stem for path, results in zip(files, runs, strict=True)]
    if len(set(names)) < len(names):
        names = list(map(str, files))
    for name, results in zip(names[1:], others, strict=True):
        found = compare_results(base, results, metrics=metric or (), force=force)
        for difference in differences(base[0], results[0]):
            typer.echo(f"different: {difference}")
        typer.echo(render_comparison(found, (names[0], name)))
    return EXIT_OK


@bench.command(name="plot")
def plot(
    files: Files,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Picture to write: .png, .svg or .pdf.")
    ],
) -> int:
    """Draw results whose records were kept.

    When requests ran, how their latencies spread, and the throughput over time.
    """
    from cardan.bench.plot import SUFFIXES, plot_results
    from cardan.bench.result import check_writable, load_results

    if output.suffix not in SUFFIXES:
        raise typer.BadParameter(f"{output}: a plot's file ends in {', '.join(SUFFIXES)}")
    with as_usage_error():
        check_writable(output)
    pairs = [(path, result) for path in files for result in load_results(path)]
    labels = [result.label or path.stem for path, result in pairs]
    plot_results([result for _, result in pairs], labels, output)
    typer.echo(f"wrote {output}")
    return EXIT_OK
