"""``cardan diff`` as a command."""

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest

from cardan.cli.main import main
from cardan.testing.tiny_models import make_tiny_model


def test_a_fault_from_the_command_line_to_its_replay(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CARDAN_FAKE", "fault=lost_write")
    monkeypatch.setenv("COLUMNS", "80")
    make_tiny_model("llama", tmp_path / "model")
    requests = tmp_path / "requests.jsonl"
    requests.write_text('{"prompt": [30, 31, 32, 33, 34]}\n')
    saved, report = tmp_path / "call", tmp_path / "report.json"
    command = ["diff", str(tmp_path / "model"), "--platform", "fake", "--max-tokens", "2"]
    command += ["--requests", str(requests), "--save", str(saved), "--json", str(report)]
    assert main(command) == 1
    printed = capsys.readouterr().out
    assert "the first call out of tolerance is attention in layers.0.self_attn by fake" in printed
    assert max(map(len, printed.split("different:")[0].splitlines())) <= 110
    found = json.loads(report.read_text())
    assert not found["equal"]
    assert (found["first"]["path"], found["first"]["step"]) == ("layers.0.self_attn", 0)
    assert found["calls"][0][found["first"]["index"]]["is_faulty"]
    # The backend by itself is right; the plan that it was given is what loses the write.
    main(["diff", "--replay", str(saved)])
    assert "attention in layers.0.self_attn" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Name the one to examine with --platform"),
        (["--platform", "cpu"], "which model?"),
        (["x", "--platform", "cpu", "--json", "/nowhere/x.json"], "no such directory"),
        (["x", "--platform", "cpu", "--max-tokens", "0"], "max-tokens"),
    ],
)
def test_wrong_command_lines(arguments, message, capsys):
    assert main(["diff", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--platform", "nosuch"], "nosuch"),
        (["demo", "--platform", "cpu", "--against", "nosuch"], "nosuch"),
        (["/nowhere/model", "--platform", "cpu"], "/nowhere/model"),
        (["--replay", "/nowhere"], "holds no call saved by"),
        (["demo", "--platform", "cpu", "--requests", "/nowhere/r"], "cannot be read"),
        (["demo", "--platform", "cpu", "-tp", "2"], "tensor_parallel_size must be 1"),
    ],
)
def test_what_cannot_be_compared(arguments, message, capsys):
    assert main(["diff", *arguments]) == 1
    assert message in capsys.readouterr().err


# Where a run is when the signal arrives: what it prints on stderr.
ANSWERED, WATCHED = "fake: request 1 of 3 answered", "calls of request 1 of 3 compared"


@pytest.mark.parametrize("line", [ANSWERED, WATCHED])
def test_an_interrupt_ends_it(tmp_path, line):
    make_tiny_model("llama", tmp_path)
    requests = tmp_path / "requests.jsonl"
    body = {"prompt": list(range(30, 50)), "max_tokens": 20}
    requests.write_text("\n".join([json.dumps(body)] * 3))
    command = [sys.executable, "-m", "cardan", "diff", str(tmp_path), "--platform", "fake"]
    with subprocess.Popen(
        [*command, "--requests", str(requests)],
        env={**os.environ, "CARDAN_FAKE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert any(line in seen for seen in process.stderr)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    assert (out, error) == ("", "")
    assert not psutil.wait_procs(children, timeout=5)[1]
