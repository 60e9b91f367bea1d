"""The documents' table of platforms, from results of the kit that are kept beside them.

A folder holds ``NAME.json``, summaries of results, and ``notes.toml``, what no result says: how far
a platform was tried (``run``, ``compiled`` or ``reviewed``), and where its page is.
"""

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cardan.testing.conformance.report import as_json, reasons_of

TRIED = {
    "run": "run",
    "emulated": "run on an emulation",
    "compiled": "compiled, not run",
    "reviewed": "only reviewed",
}
# What only a document of tests can say, and what a summary says in its place.
_DETAILS = "tests"
_NOTES = "notes.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformNote:
    """What people say of a platform. ``tried`` is a key of ``TRIED``; ``proof`` says in a sentence
    what was run, compiled or reviewed; ``page`` is a link relative to the documents, or empty."""

    name: str
    title: str
    tried: str
    proof: str
    page: str = ""


def summary_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """A result without its single tests: what failed, and why what is not supported.

    Raises:
        ValueError: the result is of a part of a run.
    """
    if document["interrupted"] or document["selection"]:
        raise ValueError(
            f"the result of {document['platform']} is of a run that was interrupted or left tests "
            "out; keep that of a whole run of cardan conformance"
        )
    failed = [
        {"level": test["level"], "id": test["id"], "reason": test["reason"]}
        for test in document[_DETAILS]
        if test["outcome"] == "failed"
    ]
    kept = {name: value for name, value in document.items() if name != _DETAILS}
    reasons = [{"reason": reason, "tests": number} for reason, number in reasons_of(document)]
    return {**kept, "failed": failed, "not_supported": reasons}


def add_result(file: Path, folder: Path) -> Path:
    """Keep the result in ``file`` as the newest of its platform; where it is kept.

    Raises:
        ValueError: as ``summary_of``.
        OSError: a file cannot be read or written.
    """
    document = json.loads(file.read_text(encoding="utf-8"))
    summary = document if _DETAILS not in document else summary_of(document)
    kept = folder / f"{summary['platform'].partition(':')[0]}.json"
    kept.write_text(as_json(summary), encoding="utf-8")
    return kept


def read_notes(folder: Path) -> list[PlatformNote]:
    """The notes in their order, which is that of the table's rows.

    Raises:
        ValueError: a field is missing, unknown or has a wrong value, or a result has no note.
    """
    path = folder / _NOTES
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    notes = [_note(name, table, path) for name, table in tables.items()]
    known = {note.name for note in notes}
    for file in sorted(folder.glob("*.json")):
        if file.stem not in known:
            raise ValueError(f"{path} has no table [{file.stem}] for {file.name}; add one")
    return notes


def as_page(folder: Path) -> str:
    """``docs/platforms.md``.

    Raises:
        ValueError: as ``read_notes``.
    """
    notes = read_notes(folder)
    results = {note.name: _result(folder, note.name) for note in notes}
    lines = [
        "# Platforms",
        "",
        "<!-- Written by scripts/platform-matrix from docs/conformance; edit that, not this. -->",
        "",
        "What each platform does, and how far that was tried. Levels are those of the",
        "[conformance kit](conformance.md); a row without a level has no result of the kit on its",
        "hardware, and its state says what stands in its place.",
        "",
        "| platform | level | state | contract | date | device |",
        "| --- | --- | --- | --- | --- | --- |",
        *(_row(note, results[note.name]) for note in notes),
        "",
        "## What was tried",
        "",
        *(f"- {_title(note)}: {note.proof}" for note in notes),
        "",
        "## Features",
        "",
        "As the platforms declare them for the device of the result.",
        "",
        "| platform | dtypes | dtypes of the cache | graphs | steps ahead | sleep | determinism |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *(_features(note, result) for note in notes if (result := results[note.name])),
    ]
    for note in notes:
        lines += _limits(note, results[note.name])
    return "\n".join(lines) + "\n"


def _note(name: str, table: Any, path: Path) -> PlatformNote:
    where = f"{path}, [{name}]"
    fields = {"title", "tried", "proof"}
    given = set(table) if isinstance(table, dict) else set()
    if not fields <= given <= fields | {"page"}:
        raise ValueError(f"{where}: has {sorted(given)}, needs title, tried, proof and may page")
    if table["tried"] not in TRIED:
        raise ValueError(f"{where}: tried must be one of {', '.join(TRIED)}")
    return PlatformNote(name=name, **table)


def _result(folder: Path, name: str) -> dict[str, Any] | None:
    file = folder / f"{name}.json"
    if not file.exists():
        return None
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def _row(note: PlatformNote, result: Mapping[str, Any] | None) -> str:
    cells = [_title(note), "no result", TRIED[note.tried], "", "", ""]
    if result is not None:
        cells[1] = result["reached"] or "none"
        cells[3:] = [result["contract"], result["date"][:10], _device(result)]
    return _joined(cells)


def _title(note: PlatformNote) -> str:
    return f"[{note.title}]({note.page})" if note.page else note.title


def _device(result: Mapping[str, Any]) -> str:
    device = result["device"]
    return f"{device['name']} ({device['arch']})" if device else str(result["device_error"])


def _features(note: PlatformNote, result: Mapping[str, Any]) -> str:
    facts = result["capabilities"]
    if facts is None:
        return _joined([note.title, *["unknown"] * 6])
    return _joined(
        [
            note.title,
            ", ".join(facts["dtypes"]),
            ", ".join(facts["kv_dtypes"]) or "those of computing",
            facts["graphs"],
            str(facts["async_depth"]),
            ", ".join(map(str, facts["sleep_levels"])) or "none",
            facts["determinism"],
        ]
    )


def _limits(note: PlatformNote, result: Mapping[str, Any] | None) -> list[str]:
    """What the result of a platform says was not done, as a section."""
    if result is None:
        return []
    counts = ", ".join(f"{level['level']} {level['passed']}" for level in result["levels"])
    versions = f"cardan {result['cardan']}, kit {result['kit']}"
    if result["distribution"] not in ("", "cardan"):
        versions += f", {result['distribution']} {result['distribution_version']}"
    host = f"Python {result['host']['python']}, {result['host']['system']}"
    lines = [
        *("", f"## Result of {note.title}", ""),
        f"{versions}, {host}. Tests that passed: {counts}.",
    ]
    if result["failed"]:
        lines += ["", "Failed:", ""]
        lines += [f"- {t['level']} `{t['id']}`: {_escape(t['reason'])}" for t in result["failed"]]
    if result["not_supported"]:
        lines += ["", "Not supported, with the number of tests:", ""]
        lines += [
            f"- {_escape(group['reason'])} ({group['tests']})" for group in result["not_supported"]
        ]
    return lines


def _joined(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(_escape, cells)) + " |"


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
