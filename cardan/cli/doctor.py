"""``cardan doctor``: what was found, what is chosen, and why."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from cardan.cli.console import EXIT_ERROR, EXIT_OK
from cardan.cli.platforms import print_platforms
from cardan.core.config.plugins import PluginConfig

if TYPE_CHECKING:
    from rich.console import Console

    from cardan.cli.device_diagnosis import DeviceDiagnosis
    from cardan.cli.diagnosis import Diagnosis

PLUGIN_STYLES: dict[str, str] = {"loaded": "green", "blocked": "dim", "failed": "bold red"}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    platform: Annotated[
        str | None,
        typer.Option(
            "--platform",
            metavar="NAME[:0,1]",
            help="Look at this platform alone.",
            show_default=False,
        ),
    ] = None,
    no_plugin: Annotated[
        list[str] | None,
        typer.Option("--no-plugin", help="A plugin not to load (several times)."),
    ] = None,
) -> int:
    """Examine platforms, devices, kernels, plugins. Exit code 0: a model could run here."""
    from cardan.cli.diagnosis import diagnose

    diagnosis = diagnose(platform, PluginConfig(blocked=tuple(no_plugin or ())))
    if as_json:
        typer.echo(json.dumps(diagnosis.as_dict(), indent=2, default=str))
    else:
        _print(diagnosis)
    return EXIT_OK if diagnosis.is_usable else EXIT_ERROR


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
