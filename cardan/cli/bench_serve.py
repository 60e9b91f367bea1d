"""``cardan bench serve``: load for any server of OpenAI's API."""

import math
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import typer

from cardan.cli.bench_options import ServeBenchOptions
from cardan.cli.bench_output import as_usage_error, destination
from cardan.cli.console import print_note
from cardan.cli.values import parse_assignments

if TYPE_CHECKING:
    from cardan.bench.record import RequestRecord
    from cardan.bench.serve_options import ServeOptions

# How often a run says how far it is.
_REPORTS = 10
# Options by the names of the fields of Arrivals.
_ARRIVALS = {
    "rate": "request_rate",
    "pattern": "arrivals",
    "burstiness": "burstiness",
    "burst_size": "burst_size",
    "ramp_to": "ramp_to",
    "ramp_seconds": "ramp_seconds",
}


def serve(options: ServeBenchOptions) -> int:
    """Load for any server of OpenAI's API."""
    target = destination(options.json, options.append, options.label, options.metadata)
    from cardan.bench.serve import run_serve

    load = serve_options(options)
    with as_usage_error():
        load.check()
    return target.deliver(run_serve(load, _progress(load.num_prompts)))


def serve_options(options: ServeBenchOptions) -> "ServeOptions":
    """The load that the options describe; what was not given keeps the load's default."""
    from cardan.bench.arrivals import Arrivals
    from cardan.bench.serve_options import ServeOptions

    arrivals = {name: getattr(options, given) for name, given in _ARRIVALS.items()}
    taken = {item.name for item in fields(ServeOptions)} - {"arrivals", "metadata", "goodput"}
    values: dict[str, Any] = {
        item.name: getattr(options, item.name) for item in fields(options) if item.name in taken
    }
    values["headers"] = parse_assignments(options.header)
    values["metadata"] = parse_assignments(options.metadata)
    values["goodput"] = tuple(options.goodput or ())
    values["percentiles"] = _percentiles(options.percentiles)
    return ServeOptions(arrivals=Arrivals(**_given(arrivals)), **_given(values))


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _percentiles(text: str | None) -> tuple[float, ...] | None:
    if text is None:
        return None
    try:
        return tuple(float(item) for item in text.split(","))
    except ValueError:
        raise typer.BadParameter(
            f"percentiles: {text!r} is not a list of numbers such as 50,90,99"
        ) from None


def _progress(total: int) -> Callable[["RequestRecord"], None]:
    """Says on stderr, at most ``_REPORTS`` times, how many requests have ended."""
    every = max(1, math.ceil(total / _REPORTS))
    ended = failed = 0

    def note(record: "RequestRecord") -> None:
        nonlocal ended, failed
        ended += 1
        failed += record.error is not None
        if ended % every == 0 or ended == total:
            print_note(f"{ended} of {total} requests ended, {failed} failed")

    return note
