"""The results of one run as a plain document, and that document as JSON, table and Markdown."""

import json
import platform as host
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from cardan.core.discovery import describe
from cardan.core.interfaces.version import contract_name
from cardan.testing.conformance.results import (
    DEFAULT_LEVELS,
    LEVELS,
    KitResult,
    count_levels,
    level_reached,
)
from cardan.testing.conformance.speed_report import speed_lines
from cardan.testing.conformance.subject import Subject

# Version of the kit's demands; two results are comparable where it is the same.
KIT_VERSION = "1.0"
# Version of the document's form; raised when a field changes its meaning or goes.
SCHEMA_VERSION = 1


def build_document(
    subject: Subject,
    results: Sequence[KitResult],
    seed: int,
    is_interrupted: bool,
    is_selection: bool = False,
) -> dict[str, Any]:
    """All that a run brought, as JSON-plain data; ``docs/conformance.md`` describes the fields.

    A run that was interrupted or left tests of its levels out has reached no level.
    """
    is_complete = not (is_interrupted or is_selection)
    counts = count_levels(results)
    return {
        "schema": SCHEMA_VERSION,
        "kit": KIT_VERSION,
        "cardan": _cardan_version(),
        "contract": contract_name(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": seed,
        "interrupted": is_interrupted,
        "selection": is_selection,
        "platform": subject.spec,
        "target": subject.target,
        "distribution": subject.distribution,
        "distribution_version": subject.version,
        "host": {"python": host.python_version(), "system": host.platform()},
        **_device_facts(subject),
        "reached": level_reached(counts) if is_complete else None,
        "levels": [{**asdict(count), "title": LEVELS[count.level]} for count in counts],
        "tests": [
            {
                "level": result.level,
                "id": result.id,
                "title": result.title,
                "outcome": result.outcome,
                "reason": result.reason,
                "seconds": round(result.seconds, 4),
                "facts": dict(result.facts),
            }
            for result in sorted(results, key=lambda result: result.level)
        ],
    }


def as_json(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=2, default=str) + "\n"


def as_table(document: Mapping[str, Any]) -> str:
    """What a terminal shows: facts, counts by level, failures, and what is not supported."""
    lines = [_subject_line(document), _device_line(document), ""]
    lines.append(f"{'level':<24}{'passed':>8}{'failed':>8}{'not supported':>15}")
    for level in document["levels"]:
        name = f"{level['level']} {level['title']}"
        lines.append(
            f"{name:<24}{level['passed']:>8}{level['failed']:>8}{level['not_supported']:>15}"
        )
    failed = _with_outcome(document, "failed")
    if failed:
        lines += ["", "failed:"]
        lines += [f"  {test['level']} {test['id']}\n     {test['reason']}" for test in failed]
    speeds = speed_lines(document)
    if speeds:
        lines += ["", "speed (reported, not judged):", *speeds]
    groups = reasons_of(document)
    if groups:
        lines += ["", "not supported:"]
        lines += [f"  {reason} ({_tests(number)})" for reason, number in groups]
    lines += [
        "",
        _verdict(document),
        f"repeat with the same random inputs: seed {document['seed']}",
    ]
    return "\n".join(lines)


def as_markdown(document: Mapping[str, Any]) -> str:
    """A section for documentation: a row of the platform matrix, then what it cannot do."""
    by_level = {level["level"]: level for level in document["levels"]}
    shown = [level for level in LEVELS if level in by_level or level in DEFAULT_LEVELS]
    cells = [_cell(by_level.get(level)) for level in shown]
    lines = [
        f"## {_escape(document['platform'])}",
        "",
        f"{_escape(_subject_line(document))}  ",
        f"{_escape(_device_line(document))}  ",
        f"{_escape(_verdict(document))} {document['date'][:10]}, seed {document['seed']}.",
        "",
        "| platform | " + " | ".join(f"{level} {LEVELS[level]}" for level in shown) + " |",
        "| --- |" + " --- |" * len(shown),
        f"| {_escape(document['platform'])} | " + " | ".join(cells) + " |",
    ]
    failed = _with_outcome(document, "failed")
    if failed:
        lines += ["", "Failed:", ""]
        lines += [f"- {test['level']} `{test['id']}`: {_escape(test['reason'])}" for test in failed]
    speeds = speed_lines(document)
    if speeds:
        lines += ["", "Speed (reported, not judged):", "", "```", *speeds, "```"]
    groups = reasons_of(document)
    if groups:
        lines += ["", "Not supported:", ""]
        lines += [f"- {_escape(reason)} ({_tests(number)})" for reason, number in groups]
    return "\n".join(lines) + "\n"


def _device_facts(subject: Subject) -> dict[str, Any]:
    """The device and its capabilities; what a faulty platform raises stands in their place."""
    try:
        platform = subject.load()
        info = subject.device_info(platform)
        capabilities = asdict(platform.capabilities(info))
        return {"device": asdict(info), "capabilities": capabilities}
    except Exception as error:
        return {"device": None, "capabilities": None, "device_error": describe(error)}


def _cardan_version() -> str:
    from cardan import __version__

    return __version__


def _subject_line(document: Mapping[str, Any]) -> str:
    origin = f"{document['distribution']} {document['distribution_version']}".strip()
    return (
        f"platform {document['platform']} ({document['target']}"
        + (f" of {origin}" if origin else "")
        + f"), contract {document['contract']}, kit {document['kit']}, cardan {document['cardan']}"
    )


def _device_line(document: Mapping[str, Any]) -> str:
    device = document["device"]
    if device is None:
        return f"no device: {document['device_error']}"
    return f"device {device['index']}: {device['name']} ({device['arch']})"


def _verdict(document: Mapping[str, Any]) -> str:
    if document["interrupted"]:
        return "interrupted: these results are incomplete."
    if document["selection"]:
        return "no level reached: only some tests of the levels were run."
    if document["reached"] is None:
        run = [level["level"] for level in document["levels"]]
        if _with_outcome(document, "failed") or run[:1] == ["L0"]:
            return "no level reached."
        if run == ["L6"]:
            return "L6 was measured; it is reached where L0 to L5 run with it (all levels)."
        return f"no level reached: L0 was not run, only {', '.join(run)}."
    return f"level reached: {document['reached']}."


def _with_outcome(document: Mapping[str, Any], outcome: str) -> list[dict[str, Any]]:
    return [test for test in document["tests"] if test["outcome"] == outcome]


def reasons_of(document: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Reasons of what is not supported with their level and number of tests, in order."""
    groups: dict[str, int] = {}
    for test in _with_outcome(document, "not supported"):
        reason = f"{test['level']} {test['reason']}"
        groups[reason] = groups.get(reason, 0) + 1
    return list(groups.items())


def _cell(level: Mapping[str, Any] | None) -> str:
    if level is None:
        return "not run"
    text = f"{level['passed']} passed"
    if level["failed"]:
        text += f", **{level['failed']} failed**"
    if level["not_supported"]:
        text += f", {level['not_supported']} not supported"
    return text


def _tests(number: int) -> str:
    return "1 test" if number == 1 else f"{number} tests"


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
