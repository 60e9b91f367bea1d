"""``cardan doctor``: what was found, what is chosen, and why."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from cardan.cli.console import EXIT_ERROR, EXIT_OK
from cardan.cli.options import EngineOptions, engine_config
from cardan.cli.platforms import print_platforms
from cardan.core.config.engine import EngineConfig
from cardan.core.config.model import ModelConfig
from cardan.core.config.plugins import PluginConfig

if TYPE_CHECKING:
    from rich.console import Console

    from cardan.cli.device_diagnosis import DeviceDiagnosis
    from cardan.cli.diagnosis import Diagnosis
    from cardan.cli.explanation import Explanation

# Options whose settings are called otherwise.
_OTHER_NAMES = {
    "device.num_threads": "threads",
    "scheduler.policy": "scheduling_policy",
    "plugins.required": "plugin",
    "plugins.blocked": "no_plugin",
    "plugins.options": "plugin_option",
}
PLUGIN_STYLES: dict[str, str] = {"loaded": "green", "blocked": "dim", "failed": "bold red"}


def doctor(
    options: EngineOptions,
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    explained: Annotated[
        bool,
        typer.Option(
            "--explain",
            help="Whose every setting and kernel of a run is, and why; of MODEL, if one is named.",
        ),
    ] = False,
) -> int:
    """Examine platforms, devices, kernels, plugins. Exit code 0: a model could run here."""
    if explained or options.model is not None:
        return _explain(options, option_sources(context), as_json)
    from cardan.cli.diagnosis import diagnose

    diagnosis = diagnose(options.platform, PluginConfig(blocked=tuple(options.no_plugin or ())))
    if as_json:
        typer.echo(json.dumps(diagnosis.as_dict(), indent=2, default=str))
    else:
        _print(diagnosis)
    return EXIT_OK if diagnosis.is_usable else EXIT_ERROR


def option_sources(context: typer.Context) -> dict[str, str]:
    """Path of each setting that the user has set -> where: flag, file or environment."""
    from cardan.cli.explanation import setting_paths

    words = {"COMMANDLINE": "user: flag", "DEFAULT_MAP": "user: file", "ENVIRONMENT": "environment"}
    found = {}
    for path in setting_paths(EngineConfig(model=ModelConfig(model=""))):
        source = context.get_parameter_source(_OTHER_NAMES.get(path) or path.partition(".")[2])
        if source is not None and source.name in words:
            found[path] = words[source.name]
    return found


def _explain(options: EngineOptions, sources: dict[str, str], as_json: bool) -> int:
    from cardan.cli.bootstrapping import import_bootstrap
    from cardan.cli.explanation import explain

    # Without a model the name is of no use but has to be there.
    config = engine_config(replace(options, model=options.model or "demo"))
    import_bootstrap()
    explanation = explain(config, options.model, sources)
    if as_json:
        typer.echo(json.dumps(explanation.as_dict(), indent=2, default=str))
    else:
        _print_explanation(explanation)
    return EXIT_OK


def _print_explanation(found: "Explanation") -> None:
    from rich.console import Console

    console = Console(highlight=False)
    rows = [
        (item.path, str(item.value), item.owner, item.reason)
        for item in (found.platform, *found.settings)
    ]
    _print_table(console, f"Settings on {found.device}", ("setting", "value", "by", "why"), rows)
    for text in found.not_followed:
        console.print(f"  [dim]not followed:[/] {text}", soft_wrap=True)
    kernels = [
        (item.op, item.provider, item.self_check, "\n".join(item.rejected))
        for item in found.kernels
    ]
    _print_table(console, "Kernels", ("op", "by", "self-check", "not chosen"), kernels)
    layers = [
        (
            item.layers,
            item.backend,
            f"{item.layout}; {item.bytes_per_token} bytes a token",
            "\n".join(item.rejected),
        )
        for item in found.attention
    ]
    _print_table(console, "Attention", ("layers", "by", "cache", "not chosen"), layers)
    _print_facts(console, "Steps", {"graphs": found.graphs})
    if found.note:
        console.print(f"  [dim]{found.note}[/]", soft_wrap=True)
    installed = [(item.package, item.group, item.names) for item in found.installed]
    title = f"Installed (contract {found.contract})"
    _print_table(console, title, ("package", "for", "names"), installed)


def _print_table(
    console: "Console", title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    from rich.markup import escape
    from rich.table import Table

    if not rows:
        return
    _print_title(console, title)
    table = Table(box=None, header_style="dim", padding=(0, 1))
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table)


def _print(diagnosis: "Diagnosis") -> None:
    from rich.console import Console

    console = Console(highlight=False)
    _print_facts(console, "Versions", diagnosis.versions)
    _print_facts(console, "Host", diagnosis.host)
    _print_platforms(console, diagnosis)
    for device in diagnosis.devices:
        _print_device(console, device)
    _print_plugins(console, diagnosis)


def _print_platforms(console: "Console", diagnosis: "Diagnosis") -> None:
    from rich.markup import escape

    _print_title(console, "Platforms")
    print_platforms(console, diagnosis.platforms)
    for duplicate in diagnosis.duplicates:
        console.print(f"  [red]duplicate:[/] {escape(duplicate)}", soft_wrap=True)
    if diagnosis.platform is not None:
        console.print(f"  [green]chosen:[/] {escape(f'{diagnosis.platform}: {diagnosis.reason}')}")
    else:
        console.print(
            f"  [bold red]nothing is usable:[/] {escape(diagnosis.error)}", soft_wrap=True
        )


def _print_device(console: "Console", item: "DeviceDiagnosis") -> None:
    from rich.markup import escape

    from cardan.cli.diagnosis import format_bytes

    device = item.device
    title = f"Device {device['index']} of {device['platform']}: {device['name']}"
    memory = format_bytes(device["memory_bytes"])
    if item.memory is not None:
        memory = f"{format_bytes(item.memory.free)} free of {format_bytes(item.memory.total)}"
        memory += "" if item.memory.exact else " (estimated)"
    facts = {"arch": device["arch"], "memory": memory}
    facts |= {
        name.replace("_", " "): ", ".join(map(str, value)) or "none"
        if isinstance(value, list | tuple)
        else str(value)
        for name, value in item.capabilities.items()
    }
    facts |= {name: str(value) for name, value in device["details"].items()}
    _print_facts(console, title, facts | item.facts)
    if item.settings:
        whose = {
            setting.path: f"{setting.value} ({setting.owner}"
            + (f": {setting.reason})" if setting.reason else ")")
            for setting in item.settings
        }
        _print_facts(console, "Settings where you set none", whose)
    _print_title(console, "Attention (for 32 heads, 8 KV heads of 128)")
    for verdict in item.attention:
        answer = (
            "[green]yes[/]" if verdict.accepted else "no: " + escape("; ".join(verdict.reasons))
        )
        console.print(f"  {escape(verdict.name)}  {answer}", soft_wrap=True)
    if not item.attention:
        console.print("  [dim]the reference alone[/]")
    _print_kernels(console, item)
    for problem in item.problems:
        console.print(f"  [red]problem:[/] {escape(problem)}", soft_wrap=True)


def _print_kernels(console: "Console", item: "DeviceDiagnosis") -> None:
    from rich.markup import escape
    from rich.table import Table

    _print_title(console, f"Kernels ({item.capabilities['dtypes'][0]})")
    if not item.kernels:
        console.print(f"  [dim]{escape(item.note or 'unknown')}[/]", soft_wrap=True)
        return
    table = Table(box=None, header_style="dim", padding=(0, 2))
    for column in ("op", "provider", "self-check", "not chosen"):
        table.add_column(column, overflow="fold")
    for row in item.kernels:
        cells = (row.op, row.provider, row.self_check, "\n".join(row.rejected))
        table.add_row(*map(escape, cells))
    console.print(table)


def _print_plugins(console: "Console", diagnosis: "Diagnosis") -> None:
    from rich.markup import escape

    _print_title(console, "Plugins")
    if diagnosis.plugin_problem:
        console.print(f"  [red]problem:[/] {escape(diagnosis.plugin_problem)}", soft_wrap=True)
    for item in diagnosis.plugins:
        origin = f"{item['distribution']} {item['version']}  {item['file']}"
        console.print(
            f"  {escape(item['name'])} [{PLUGIN_STYLES[item['state']]}]{item['state']}[/] "
            f"{escape(item['reason'])}  [dim]{escape(origin)}[/]",
            soft_wrap=True,
        )
    if not diagnosis.plugins:
        console.print("  [dim]none installed[/]")


def _print_facts(console: "Console", title: str, facts: dict[str, str]) -> None:
    from rich.markup import escape

    _print_title(console, title)
    width = max(map(len, facts))
    for name, value in facts.items():
        console.print(f"  [dim]{escape(name):<{width}}[/]  {escape(str(value))}", soft_wrap=True)


def _print_title(console: "Console", title: str) -> None:
    from rich.markup import escape

    console.print(f"\n[bold]{escape(title)}[/]")
