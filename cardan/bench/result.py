"""The result of one benchmark, as it is kept in a file.

A file holds one JSON object, or one a line (JSON Lines), so that runs can be appended. ``config``
is what must be equal for two results to be compared; ``samples`` has the figures of each repeat by
their flat names, and ``metrics`` what they add up to.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cardan.core.types.engine_info import EngineInfo
from cardan.core.types.errors import ConfigError

SCHEMA_VERSION = 1
KINDS: tuple[str, ...] = ("latency", "throughput", "serve", "startup", "perplexity", "kl")


def installed_version(package: str) -> str:
    """A package's version without importing it; "not installed" if it has none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


@cache
def source_commit() -> str | None:
    """Commit of the checkout that cardan runs from, with ``+`` if files differ; None elsewhere."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    try:
        commit, changes = (
            subprocess.run(
                ["git", "-C", str(root), *arguments],
                capture_output=True,
                text=True,
                check=True,
                timeout=10,
            ).stdout.strip()
            for arguments in (
                ("rev-parse", "--short", "HEAD"),
                ("status", "--porcelain", "--untracked-files=no"),
            )
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("+" if changes else "")


def host_facts() -> dict[str, Any]:
    """This machine: system, processor, usable CPUs, memory in bytes, versions that matter."""
    usable = getattr(os, "sched_getaffinity", None)
    facts: dict[str, Any] = {
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor() or platform.machine(),
        "cpus": len(usable(0)) if usable else os.cpu_count() or 0,
        "python": platform.python_version(),
        "torch": installed_version("torch"),
    }
    try:
        facts["memory_bytes"] = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        facts["load_1m"] = round(os.getloadavg()[0], 2)
    except (AttributeError, ValueError, OSError):
        pass  # not told by this system
    return facts


def engine_facts(info: EngineInfo) -> dict[str, Any]:
    """The device that an engine runs on, and how."""
    return {"platform": info.platform, "name": info.device, "dtype": info.dtype}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _processor() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One benchmark's outcome.

    Attributes:
        kind: One of ``KINDS``.
        model: As the user named it.
        config: Load and engine settings, by section; what two results must share.
        metrics: All figures, nested by name.
        samples: For each repeat its figures, flat: ``ttft_ms``, ``output_tokens_per_s``, ...
        device: What computed: platform, name, dtype; empty if it is not known.
        records: One mapping for each request, if they were kept (``RequestRecord``'s fields).
        notes: Remarks that a reader of the figures needs.
        metadata: What the user wants to remember besides.
        interrupted: Whether it was stopped before its end.
    """

    kind: str
    model: str
    config: dict[str, Any]
    metrics: dict[str, Any]
    samples: list[dict[str, float]]
    device: dict[str, Any] = field(default_factory=dict)
    label: str = ""
    metadata: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    records: list[dict[str, Any]] | None = None
    interrupted: bool = False
    host: dict[str, Any] = field(default_factory=host_facts)
    cardan_version: str = field(default_factory=lambda: installed_version("cardan"))
    commit: str | None = field(default_factory=source_commit)
    date: str = field(default_factory=_now)
    schema_version: int = SCHEMA_VERSION

    def as_dict(self) -> dict[str, Any]:
        """For JSON; ``schema_version`` and ``kind`` come first."""
        values = asdict(self)
        return {"schema_version": values.pop("schema_version"), **values}


def flatten(figures: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of nested figures by their path: ``ttft_ms.p99``. None and text are left out."""
    flat: dict[str, float] = {}
    for name, value in figures.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{path}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            flat[path] = float(value)
    return flat


def save_result(result: Result, path: Path) -> None:
    """Write one result to its own file.

    Raises:
        ConfigError: the file cannot be written.
    """
    _write(path, json.dumps(result.as_dict(), indent=2) + "\n", "w")


def append_result(result: Result, path: Path) -> None:
    """Add one result to a file as one line.

    Raises:
        ConfigError: the file cannot be written.
    """
    _write(path, json.dumps(result.as_dict()) + "\n", "a")


def check_writable(path: Path) -> Path:
    """``path``, if a result can be written there; asked before an hour of measuring, not after.

    Raises:
        ConfigError: it is a directory, or its directory is missing or not writable.
    """
    if path.is_dir():
        raise ConfigError(f"{path}: is a directory; name a file")
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: there is no directory {path.parent}; make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{path}: cannot be written; choose another place")
    return path


def load_results(path: Path) -> list[Result]:
    """All results of a file.

    Raises:
        ConfigError: the file cannot be read, or holds something else; the line is named.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not text"
        raise ConfigError(f"{path}: cannot be read: {reason}") from None
    try:
        return [_as_result(json.loads(text), str(path))]
    except json.JSONDecodeError:
        pass  # then it has one result a line
    results = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            results.append(_as_result(json.loads(line), f"{path}:{number}"))
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}:{number}: is not JSON: {error.msg}") from None
    if not results:
        raise ConfigError(f"{path}: is empty; it should hold results of cardan bench")
    return results


def _as_result(values: Any, where: str) -> Result:
    found = values.get("schema_version") if isinstance(values, dict) else None
    if found is None:
        raise ConfigError(f"{where}: is no result of cardan bench (it has no schema_version)")
    if found != SCHEMA_VERSION:
        raise ConfigError(
            f"{where}: has schema_version {found}, this cardan reads {SCHEMA_VERSION}; "
            "use the cardan that wrote it"
        )
    names = {item.name for item in fields(Result)}
    missing = [name for name in sorted(names) if name not in values]
    unknown = [name for name in sorted(values) if name not in names]
    if missing or unknown:
        problem = f"lacks {', '.join(missing)}" if missing else f"has unknown {', '.join(unknown)}"
        raise ConfigError(f"{where}: {problem}; was it edited?")
    if not isinstance(values["samples"], Sequence) or values["kind"] not in KINDS:
        raise ConfigError(f"{where}: kind {values['kind']!r} or its samples are damaged")
    return Result(**values)


def _write(path: Path, text: str, mode: str) -> None:
    try:
        with path.open(mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
