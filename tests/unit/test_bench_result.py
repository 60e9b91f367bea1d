"""Files of results: what is written is what is read, and what is damaged says where."""

import json
import subprocess
from dataclasses import asdict

import pytest

from cardan.bench.record import RequestRecord
from cardan.bench.result import (
    SCHEMA_VERSION,
    Result,
    append_result,
    check_writable,
    flatten,
    load_results,
    save_result,
    source_commit,
)
from cardan.core.types.errors import ConfigError

# The schema of version 1: a change here needs a new number.
NAMES = [
    "schema_version", "kind", "model", "config", "metrics", "samples", "device", "label",
    "metadata", "notes", "records", "interrupted", "host", "cardan_version", "commit", "date",
]  # fmt: skip


def make_result(**changes):
    values = {
        "kind": "latency",
        "model": "demo",
        "config": {"load": {"input_len": 32}},
        "metrics": {"ttft_ms": {"median": 1.5}},
        "samples": [{"ttft_ms": 1.5}],
    }
    return Result(**(values | changes))


def test_schema_is_stable():
    assert SCHEMA_VERSION == 1
    assert list(make_result().as_dict()) == NAMES


def test_round_trip(tmp_path):
    record = RequestRecord(0, 0.0, 0.25, 0.5, [0.5, 0.75], [1, 2], 0.75, 3, 3)
    result = make_result(label="a", metadata={"x": "y"}, notes=["n"], records=[asdict(record)])
    save_result(result, tmp_path / "a.json")
    [loaded] = load_results(tmp_path / "a.json")
    assert loaded == result
    assert [RequestRecord(**item) for item in loaded.records] == [record]


def test_appended_lines(tmp_path):
    path = tmp_path / "all.jsonl"
    results = [make_result(label=str(number)) for number in range(3)]
    for result in results:
        append_result(result, path)
    assert path.read_text().count("\n") == 3
    assert load_results(path) == results


def test_facts_of_the_machine_are_filled_in():
    result = make_result()
    assert {"system", "processor", "cpus", "python", "torch"} <= set(result.host)
    assert result.host["cpus"] >= 1
    assert result.date.endswith("+00:00")
    json.dumps(result.as_dict(), allow_nan=False)


def test_commit_is_gits():
    git = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    if git.returncode == 0 and source_commit() is not None:
        assert source_commit().rstrip("+") == git.stdout.strip()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("not json", "bad.json:1: is not JSON"),
        ("[1]", "is no result of cardan bench"),
        ('{"a": 1}', "is no result of cardan bench"),
        ('{"schema_version": 99}', "has schema_version 99, this cardan reads 1"),
        ('{"schema_version": 1}', "lacks cardan_version, commit"),
    ],
)
def test_damaged_files(tmp_path, text, message):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_results(path)


def test_damaged_line_is_named(tmp_path):
    path = tmp_path / "bad.jsonl"
    append_result(make_result(), path)
    with path.open("a") as file:
        file.write("\n{broken\n")
    with pytest.raises(ConfigError, match=r"bad\.jsonl:3: is not JSON"):
        load_results(path)


def test_unknown_fields_and_kinds(tmp_path):
    path = tmp_path / "a.json"
    values = make_result().as_dict()
    path.write_text(json.dumps(values | {"extra": 1}))
    with pytest.raises(ConfigError, match="has unknown extra"):
        load_results(path)
    path.write_text(json.dumps(values | {"kind": "speed"}))
    with pytest.raises(ConfigError, match="kind 'speed'"):
        load_results(path)


def test_unreadable_and_unwritable_places(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_results(tmp_path / "none.json")
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not text"):
        load_results(binary)
    with pytest.raises(ConfigError, match="is a directory"):
        check_writable(tmp_path)
    with pytest.raises(ConfigError, match="there is no directory"):
        check_writable(tmp_path / "none" / "a.json")
    with pytest.raises(ConfigError, match="cannot be written"):
        save_result(make_result(), tmp_path / "none" / "a.json")
    assert check_writable(tmp_path / "a.json") == tmp_path / "a.json"


def test_flatten_keeps_numbers_alone():
    nested = {"a": 1, "b": {"c": 2.5, "d": None, "e": "text", "f": True}, "g": {"h": {"i": 0}}}
    assert flatten(nested) == {"a": 1.0, "b.c": 2.5, "g.h.i": 0.0}
