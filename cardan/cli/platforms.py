"""``cardan platforms``: who is installed, and what each of them finds."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cardan.cli.console import EXIT_OK
from cardan.core.discovery import NOT_INSTALLED, Discovery
from cardan.core.interfaces.capabilities import DeviceInfo
from cardan.core.interfaces.errors import PluginError
from cardan.core.platform_selection import PlatformReport, installed_platforms, probe_platforms

if TYPE_CHECKING:
    from rich.console import Console

STATE_STYLES: dict[str, str] = {"present": "green", "absent": "dim", "broken": "bold red"}


def platforms(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """List all platforms, what they find here, and why not."""
    discovery = Discovery()
    report = probe_platforms(installed_platforms(discovery))
    if as_json:
        typer.echo(json.dumps([platform_fields(item) for item in report], indent=2))
        return EXIT_OK
    if not report:
        raise PluginError(NOT_INSTALLED)
    from rich.console import Console

    print_platforms(Console(highlight=False), [platform_fields(item) for item in report])
    return EXIT_OK


def print_platforms(console: "Console", probes: Sequence[dict[str, Any]]) -> None:
    """A few lines for each probe: state, reason, fix, devices."""
    from rich.markup import escape

    for item in probes:
        score = f" (score {item['score']})" if item["state"] == "present" else ""
        console.print(
            f"  [bold]{escape(item['name'])}[/] "
            f"[{STATE_STYLES[item['state']]}]{item['state']}[/]{score} "
            f"{escape(item['reason'])}  [dim]{escape(item['distribution'])} {item['version']}[/]",
            soft_wrap=True,
        )
        for device in item["devices"]:
            text = f"{device['index']}: {device['name']} ({device['arch']})"
            console.print(f"    {escape(text)}", soft_wrap=True)
        if item["fix"]:
            console.print(f"    fix: {escape(item['fix'])}", soft_wrap=True)


def platform_fields(item: PlatformReport) -> dict[str, Any]:
    """One probe as plain data."""
    return {
        "name": item.name,
        "state": item.probe.state,
        "score": item.probe.score,
        "reason": item.probe.reason,
        "fix": item.probe.fix,
        "devices": [device_fields(device) for device in item.devices],
        "distribution": item.distribution,
        "version": item.version,
        "seconds": round(item.seconds, 4),
    }


def device_fields(device: DeviceInfo) -> dict[str, Any]:
    """One device as plain data."""
    return {
        "platform": device.platform,
        "index": device.index,
        "name": device.name,
        "arch": device.arch,
        "memory_bytes": device.memory_bytes,
        "details": dict(device.details),
    }
