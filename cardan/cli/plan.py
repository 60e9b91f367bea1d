"""``cardan plan``: will a model fit on a device, and how fast can it be? Nothing is loaded."""

import json
import re
from typing import TYPE_CHECKING, Annotated

import typer

from cardan.cli.console import EXIT_ERROR, EXIT_OK
from cardan.cli.options import EngineOptions, engine_config, option
from cardan.cli.values import parse_count
from cardan.core.types.errors import ConfigError

if TYPE_CHECKING:
    from cardan.core.config.engine import EngineConfig
    from cardan.plan.planner import Load, PlanRequest

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)


def _parse_length(value: str | int) -> int:
    count = parse_count(value)
    if not count:
        raise typer.BadParameter("must be at least 1")
    return count


def plan(
    options: EngineOptions,
    device: Annotated[
        str | None,
        option(
            "--device",
            metavar="NAME",
            help="A device that need not be here, such as H200; platforms know some by name.",
        ),
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Measure the device's peaks where no data sheet has them (a second)."
        ),
    ] = False,
    batch: Annotated[
        str,
        option(
            "--batch",
            metavar="COUNT,...",
            help="Sequences that decode at once. Default: 1,64,256.",
        ),
    ] = "1,64,256",
    context: Annotated[
        int | None,
        option(
            "--context",
            parser=_parse_length,
            metavar="COUNT",
            help="Tokens that each of them sees. Default: 1024.",
        ),
    ] = None,
    prompt: Annotated[
        int | None,
        option(
            "--prompt",
            parser=_parse_length,
            metavar="COUNT",
            help="Tokens of the prompt whose time is given. Default: 8192.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Predict fit, KV cache and speed without loading the weights. Exit code 0: it fits."""
    config = engine_config(options)
    _refuse_downloads(config.model.model)
    from cardan.cli.plan_report import plan_fields, plan_lines
    from cardan.plan.alternatives import alternatives
    from cardan.plan.planner import Load, make_plan

    load = Load(_batches(batch), context, prompt)
    request = _request(config, device, measure, load)
    found = make_plan(request)
    others = alternatives(request, found)
    if as_json:
        typer.echo(json.dumps(plan_fields(request, found, others), indent=2))
    else:
        typer.echo("\n".join(plan_lines(request, found, others)))
    return EXIT_OK if found.does_fit else EXIT_ERROR


def _request(
    config: "EngineConfig", device: str | None, measure: bool, load: "Load"
) -> "PlanRequest":
    from cardan.bootstrap.model_source import gguf_plugin, read_model
    from cardan.core.discovery import Discovery
    from cardan.core.platform_selection import installed_platforms
    from cardan.core.weights.tensor_table import stored_tensors
    from cardan.plan.planner import PlanRequest
    from cardan.plan.target import choose_target

    source = read_model(config.model)
    candidates = installed_platforms(Discovery())
    target = choose_target(config.device.platform, device, candidates, measure)
    return PlanRequest(config, source, stored_tensors(source.files, gguf_plugin), target, load)


def _batches(text: str) -> tuple[int, ...]:
    counts = tuple(parse_count(part) for part in text.split(","))
    if not all(counts):
        raise typer.BadParameter(f"--batch {text!r}: each count must be at least 1")
    return counts


def _refuse_downloads(model: str) -> None:
    """A model on the hub would be fetched whole, which is not what a plan is for."""
    from pathlib import Path

    if _HUB_ID.fullmatch(model) and not Path(model).exists():
        raise ConfigError(
            f"{model}: there is no such directory, and cardan plan downloads nothing; its "
            f"config.json alone is enough: hf download {model} config.json --local-dir DIRECTORY"
        )
