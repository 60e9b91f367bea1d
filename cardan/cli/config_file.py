"""``--config FILE``: options from a JSON or TOML file; the command line wins over it."""

import json
import tomllib
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import typer

from cardan.core.types.errors import ConfigError


def load_config_file(context: typer.Context, file: Path | None) -> Path | None:
    """Make the values of ``file`` the defaults of the running command (an eager callback).

    Keys are the command's options without their dashes, in either spelling.

    Raises:
        ConfigError: the file cannot be read, is not a table, or has an unknown key.
    """
    if file is None or context.resilient_parsing:
        return file
    known = _names_of(context)
    defaults: dict[str, Any] = {}
    for key, value in _read(file).items():
        name = key.replace("-", "_")
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f", did you mean {near[0].replace('_', '-')}?" if near else ""
            raise ConfigError(
                f"{file}: {key} is no option of `{context.command_path}`{hint} "
                f"(see {context.command_path} --help)"
            )
        defaults[known[name]] = value
    context.default_map = {**defaults, **(context.default_map or {})}
    return file


def _names_of(context: typer.Context) -> dict[str, str]:
    """Every long spelling (without dashes, with underscores) -> the parameter's name."""
    names: dict[str, str] = {}
    for parameter in context.command.params:
        if parameter.name is None or parameter.name in ("config", "help"):
            continue
        names[parameter.name] = parameter.name
        for spelling in parameter.opts:
            if spelling.startswith("--"):
                names[spelling[2:].replace("-", "_")] = parameter.name
    return names


def _read(file: Path) -> dict[str, Any]:
    if file.suffix not in (".json", ".toml"):
        raise ConfigError(f"{file}: a configuration file ends in .json or .toml")
    try:
        text = file.read_text(encoding="utf-8")
        values = json.loads(text) if file.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{file}: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: must hold one object of options")
    return values
