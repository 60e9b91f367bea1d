"""The table of platforms in the documents, and badges: made from results, and nothing else."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from cardan.testing.conformance.badge import as_badge, as_endpoint
from cardan.testing.conformance.report import build_document
from cardan.testing.conformance.results import KitResult
from cardan.testing.conformance.subject import resolve_subject
from cardan.testing.conformance.support_matrix import add_result, as_page, read_notes, summary_of

DOCS = Path(__file__).parents[2] / "docs"
NOTES = """
[cpu]
title = "CPU"
tried = "run"
proof = "Run here."

[npu]
title = "Some | NPU"
tried = "reviewed"
proof = "Read."
page = "npu.md"
"""


def a_document(is_selection=False):
    results = [
        KitResult(level="L0", id="a::x", title="X", outcome="passed"),
        KitResult(level="L1", id="b::y", title="Y", outcome="failed", reason="a | b"),
        KitResult(level="L1", id="b::z", title="Z", outcome="not supported", reason="none here"),
    ]
    cpu = resolve_subject("cpu")
    return build_document(cpu, results, 7, is_interrupted=False, is_selection=is_selection)


def test_documents_agree_with_results():
    """scripts/platform-matrix writes the page; whoever edits a result runs it."""
    assert (DOCS / "platforms.md").read_text(encoding="utf-8") == as_page(DOCS / "conformance")


def test_kept_results_are_of_whole_runs():
    names = {note.name for note in read_notes(DOCS / "conformance")}
    for file in (DOCS / "conformance").glob("*.json"):
        kept = json.loads(file.read_text(encoding="utf-8"))
        assert kept["platform"] == file.stem
        assert kept["platform"] in names
        assert not kept["interrupted"]
        assert not kept["selection"]
        assert "tests" not in kept


def test_a_result_is_kept_without_its_tests(tmp_path):
    file = tmp_path / "result.json"
    file.write_text(json.dumps(a_document(), default=str))
    (tmp_path / "kept").mkdir()
    kept = add_result(file, tmp_path / "kept")
    assert kept.name == "cpu.json"
    summary = json.loads(kept.read_text())
    assert summary["failed"] == [{"level": "L1", "id": "b::y", "reason": "a | b"}]
    assert summary["not_supported"] == [{"reason": "L1 none here", "tests": 1}]
    assert (summary["reached"], "tests" in summary) == ("L0", False)
    # What was kept may be added again.
    assert add_result(kept, tmp_path / "kept").read_text() == json.dumps(summary, indent=2) + "\n"
    with pytest.raises(ValueError, match="keep that of a whole run"):
        summary_of(a_document(is_selection=True))


def test_page(tmp_path):
    (tmp_path / "notes.toml").write_text(NOTES)
    summary = summary_of(a_document())
    (tmp_path / "cpu.json").write_text(json.dumps(summary, default=str))
    page = as_page(tmp_path)
    name = summary["device"]["name"]
    date = summary["date"][:10]
    arch = summary["device"]["arch"]
    assert f"| CPU | L0 | run | {summary['contract']} | {date} | {name} ({arch}) |" in page
    assert "| [Some \\| NPU](npu.md) | no result | only reviewed |  |  |  |" in page
    # Which of them comes first depends on the machine.
    dtypes = ", ".join(summary["capabilities"]["dtypes"])
    assert f"| CPU | {dtypes} | int8 | decode | 0 | 1, 2 | run |" in page
    assert "- L1 `b::y`: a \\| b" in page
    assert "- L1 none here (1)" in page
    assert "## Result of Some" not in page


@pytest.mark.parametrize(
    ("notes", "told"),
    [
        (NOTES.replace('"reviewed"', '"guessed"'), r"\[npu\]: tried must be one of run, emulated"),
        (NOTES.replace("proof", "prove"), r"\[cpu\]: has .*'prove'.* needs title, tried, proof"),
        (NOTES.replace("[cpu]", "[cqu]"), r"no table \[cpu\] for cpu.json; add one"),
    ],
)
def test_wrong_notes(tmp_path, notes, told):
    (tmp_path / "notes.toml").write_text(notes)
    (tmp_path / "cpu.json").write_text("{}")
    with pytest.raises(ValueError, match=told):
        read_notes(tmp_path)


@pytest.mark.parametrize(
    ("reached", "colour", "message"),
    [
        (None, "red", "no level · contract 1.0"),
        ("L4", "yellow", "L4 · contract 1.0"),
        ("L5", "green", "L5 · contract 1.0"),
        ("L6", "green", "L6 · contract 1.0"),
    ],
)
def test_badge(reached, colour, message):
    document = {**a_document(), "reached": reached, "contract": "1.0", "platform": "<&>"}
    assert json.loads(as_endpoint(document)) == {
        "schemaVersion": 1,
        "label": "cardan",
        "message": message,
        "color": colour,
    }
    root = ElementTree.fromstring(as_badge(document))
    svg = "{http://www.w3.org/2000/svg}"
    assert [text.text for text in root.iter(f"{svg}text")] == ["cardan", message]
    assert "(<&>, " in root.find(f"{svg}title").text
    # Words lie within the badge, one after the other.
    ends = []
    for text in root.iter(f"{svg}text"):
        half = float(text.get("textLength")) / 2
        ends += [float(text.get("x")) - half, float(text.get("x")) + half]
    assert ends == sorted(ends)
    assert 0 < ends[0] < ends[-1] < float(root.get("width"))
