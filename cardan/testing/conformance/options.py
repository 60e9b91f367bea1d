"""Command-line options of the pytest plugin."""

import secrets
from dataclasses import dataclass
from pathlib import Path

import pytest

from cardan.testing.conformance.results import DEFAULT_LEVELS, LEVELS

MISSING_PLATFORM = "name a platform with --cardan-platform NAME (cardan platforms lists them)"


@dataclass(frozen=True, slots=True)
class KitOptions:
    """What a run of the kit was asked for; ``levels`` in order."""

    spec: str
    levels: tuple[str, ...]
    seed: int
    json_file: Path | None
    markdown_file: Path | None
    badge_file: Path | None


def add_options(parser: pytest.Parser) -> None:
    """Declare the options, all of them named ``--cardan-...``."""
    group = parser.getgroup("cardan", "conformance kit of cardan's platforms")
    group.addoption(
        "--cardan-platform",
        metavar="SPEC",
        help="platform to examine: NAME, NAME:INDEX of a device, or MODULE:CLASS",
    )
    group.addoption(
        "--cardan-level",
        metavar="L0,L3",
        help=f"levels to run of {', '.join(LEVELS)}, or all (default: {', '.join(DEFAULT_LEVELS)})",
    )
    group.addoption("--cardan-json", metavar="FILE", help="write the results as JSON")
    group.addoption("--cardan-markdown", metavar="FILE", help="write the results as Markdown")
    group.addoption(
        "--cardan-badge",
        metavar="FILE",
        help="write a badge: an SVG, or as .json what shields.io draws one from",
    )
    group.addoption(
        "--cardan-seed",
        metavar="N",
        type=int,
        help="seed of all random inputs (default: a fresh one, which the report states)",
    )


def read_options(config: pytest.Config) -> KitOptions | None:
    """The options of this run, or None where no platform was named.

    Raises:
        pytest.UsageError: a level is unknown, the seed negative or a badge of another kind.
    """
    spec = config.getoption("--cardan-platform", default=None)
    if spec is None:
        return None
    if config.option.cardan_seed is None:
        # Kept in the options so that workers of a distributed run have the same one.
        config.option.cardan_seed = secrets.randbelow(2**31)
    if config.option.cardan_seed < 0:
        raise pytest.UsageError("--cardan-seed must be a whole number from 0")
    return KitOptions(
        spec=spec,
        levels=_levels(config.getoption("--cardan-level")),
        seed=config.option.cardan_seed,
        json_file=_path(config.getoption("--cardan-json")),
        markdown_file=_path(config.getoption("--cardan-markdown")),
        badge_file=_badge(config.getoption("--cardan-badge")),
    )


def _levels(text: str | None) -> tuple[str, ...]:
    if text is None:
        return DEFAULT_LEVELS
    if text.strip().lower() == "all":
        return tuple(LEVELS)
    asked = {part.strip().upper() for part in text.split(",")}
    unknown = sorted(asked - set(LEVELS))
    if unknown:
        raise pytest.UsageError(
            f"--cardan-level {text}: {unknown[0] or 'an empty name'} is no level, "
            f"there are {', '.join(LEVELS)}"
        )
    return tuple(level for level in LEVELS if level in asked)


def _badge(text: str | None) -> Path | None:
    path = _path(text)
    if path is not None and path.suffix not in (".svg", ".json"):
        raise pytest.UsageError(f"--cardan-badge {text}: its name must end in .svg or .json")
    return path


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text).absolute()
