"""The kit's outcomes, levels, reports, specs and command line, without running it."""

import json
import os
from pathlib import Path

import pytest

from cardan.cli.main import main
from cardan.testing.conformance import run
from cardan.testing.conformance.report import as_markdown, as_table, build_document
from cardan.testing.conformance.results import (
    KitResult,
    KitResults,
    LevelCount,
    count_levels,
    level_reached,
    result_of,
)
from cardan.testing.conformance.run import KitRun, command
from cardan.testing.conformance.subject import SubjectError, resolve_subject


def report_of(outcome, when="call", longrepr=None, **properties):
    labels = {"cardan_level": "L2", "cardan_id": "m::t", "cardan_title": "T", **properties}
    return pytest.TestReport(
        nodeid="m.py::t",
        location=("m.py", 1, "t"),
        keywords={},
        outcome=outcome,
        longrepr=longrepr,
        when=when,
        user_properties=list(labels.items()),
        duration=0.5,
    )


def test_outcome_of_a_report():
    passed = result_of(report_of("passed", seconds=3))
    assert (passed.level, passed.outcome, passed.facts) == ("L2", "passed", {"seconds": 3})
    skipped = result_of(report_of("skipped", longrepr=("m.py", 3, "Skipped: no such thing")))
    assert (skipped.outcome, skipped.reason) == ("not supported", "no such thing")
    failed = result_of(report_of("failed", "setup", longrepr="E   first\nE   ValueError: bad"))
    assert failed.outcome == "failed"
    assert failed.reason.startswith("setup: ")
    assert "ValueError: bad" in failed.reason
    foreign = report_of("passed")
    foreign.user_properties = []
    assert result_of(foreign) is None


def test_phases_of_a_test_are_merged():
    results = KitResults()
    for when, outcome in (("setup", "passed"), ("call", "passed"), ("teardown", "failed")):
        results.add(result_of(report_of(outcome, when, "boom" if outcome == "failed" else None)))
    (only,) = results.all()
    assert (only.outcome, only.reason, only.seconds) == ("failed", "teardown: boom", 1.5)
    results.add(result_of(report_of("passed")))
    assert results.all()[0].outcome == "failed"


@pytest.mark.parametrize(
    ("counts", "reached"),
    [
        ([], None),
        ([("L0", 3, 0, 0)], "L0"),
        ([("L1", 3, 0, 0)], None),
        ([("L0", 3, 1, 0), ("L1", 3, 0, 0)], None),
        ([("L0", 3, 0, 0), ("L1", 0, 0, 4), ("L2", 1, 1, 0)], "L1"),
        ([("L0", 3, 0, 0), ("L2", 1, 0, 0)], "L0"),
        ([(f"L{n}", 1, 0, 0) for n in range(6)], "L5"),
    ],
)
def test_level_reached(counts, reached):
    assert level_reached([LevelCount(*count) for count in counts]) == reached


def some_results():
    return [
        KitResult(level="L1", id="b::y", title="Y", outcome="failed", reason="a | b"),
        KitResult(level="L0", id="a::x", title="X", outcome="passed", facts={"n": 1}),
        KitResult(level="L1", id="b::z1", title="Z", outcome="not supported", reason="none here"),
        KitResult(level="L1", id="b::z2", title="Z", outcome="not supported", reason="none here"),
    ]


def test_reports():
    results = some_results()
    assert count_levels(results) == (LevelCount("L0", 1, 0, 0), LevelCount("L1", 0, 1, 2))
    document = build_document(resolve_subject("cpu"), results, seed=7, is_interrupted=False)
    assert [test["level"] for test in document["tests"]] == ["L0", "L1", "L1", "L1"]
    table = as_table(document)
    rows = [line.split() for line in table.splitlines()]
    assert ["L0", "hygiene", "1", "0", "0"] in rows
    assert ["L1", "device", "and", "memory", "0", "1", "2"] in rows
    assert "L1 b::y\n     a | b" in table
    assert "L1 none here (2 tests)" in table
    assert "level reached: L0." in table
    assert "seed 7" in table
    markdown = as_markdown(document)
    assert "| cpu | 1 passed | 0 passed, **1 failed**, 2 not supported | not run |" in markdown
    assert "- L1 `b::y`: a \\| b" in markdown
    partial = build_document(resolve_subject("cpu"), results, seed=7, is_interrupted=True)
    assert "interrupted: these results are incomplete." in as_table(partial)
    assert partial["reached"] is None
    json.dumps(document)


def test_a_selection_of_tests_reaches_no_level():
    results = [KitResult(level="L0", id="a::x", title="X", outcome="passed")]
    cpu = resolve_subject("cpu")
    whole = build_document(cpu, results, seed=7, is_interrupted=False)
    assert (whole["reached"], whole["selection"]) == ("L0", False)
    part = build_document(cpu, results, seed=7, is_interrupted=False, is_selection=True)
    assert (part["reached"], part["selection"]) == (None, True)
    for text in (as_table(part), as_markdown(part)):
        assert "no level reached: only some tests of the levels were run." in text


def test_specs():
    cpu = resolve_subject("cpu")
    assert (cpu.target, cpu.index) == ("cardan.platforms.cpu.platform:CpuPlatform", None)
    assert (cpu.entry, cpu.distribution) == ("cpu", "cardan")
    assert resolve_subject("cpu:3").index == 3
    named = resolve_subject("cardan.platforms.cpu.platform:CpuPlatform:1")
    assert (named.entry, named.index, named.distribution) == ("", 1, "cardan")
    assert named.load().name == "cpu"
    for spec, told in (
        ("gpu", r"no platform named 'gpu'.*installed: .*cpu.*MODULE:CLASS"),
        ("no_such.module:Thing", "there is no module no_such.module"),
        ("cpu:x-y", "neither NAME, NAME:INDEX nor MODULE:CLASS"),
        (":Thing", "neither NAME"),
    ):
        with pytest.raises(SubjectError, match=told):
            resolve_subject(spec)
    sixth = resolve_subject("cpu:5")
    with pytest.raises(SubjectError, match="no device 5, there are: 0"):
        sixth.device_info(named.load())
    with pytest.raises(SubjectError, match="is not a subclass"):
        resolve_subject("cardan.core.interfaces.capabilities:DeviceInfo").load()
    with pytest.raises(SubjectError, match=r"cannot be loaded: AttributeError"):
        resolve_subject("cardan.platforms.cpu.platform:Nothing").load()


def test_command_line_of_pytest():
    words = command(KitRun(spec="acme:1", levels="L0,L3", seed=5, expression="copies"))
    assert words[1:3] == ["-m", "pytest"]
    # By its place: pytest reads the conftest.py of where it is called if it is given a name.
    assert Path(words[3]) == Path(run.__file__).parent
    assert {"--cardan-platform=acme:1", "--cardan-level=L0,L3", "--cardan-seed=5"} <= set(words)
    assert words[words.index("-k") + 1] == "copies"
    assert os.devnull in words


def test_missing_pytest(monkeypatch, capfd):
    monkeypatch.setattr("cardan.testing.conformance.run.find_spec", lambda name: None)
    assert main(["conformance", "cpu"]) == 2
    assert "pip install 'cardan[conformance]'" in capfd.readouterr().err
