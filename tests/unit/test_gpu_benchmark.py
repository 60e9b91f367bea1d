"""The parts of ``benchmarks/gpu.py``, on the CPU platform where they need one."""

import ast
import json
import random
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

# They are found through the line above.
import gpu
from gpu_rows import parity, sanitize, sanitized_steps, start, truth
from gpu_rows.agreement import GAPS, Agreement
from gpu_rows.busy import covered
from gpu_rows.engine import write_model
from gpu_rows.floors import decode_floor_s, prefill_floor_s
from gpu_rows.rows import Rows
from gpu_rows.traffic import fault_of

from cardan.platforms.cpu.attention import CpuAttention
from cardan.platforms.cpu.platform import CpuPlatform


def printed(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


# As the tables of measured peers have them, milliseconds.
@pytest.mark.parametrize(
    ("shape", "batch", "context", "want"),
    [
        ("8B", 1, 192, 3.49),
        ("8B", 64, 192, 3.86),
        ("8B", 256, 192, 6.37),
        ("8B", 16, 16448, 11.49),
        ("0.6B", 1, 192, 0.28),
        ("0.6B", 256, 192, 1.70),
        ("0.6B", 16, 16448, 7.28),
        ("30B-A3B", 1, 192, 1.42),
        ("30B-A3B", 256, 192, 15.15),
        ("30B-A3B", 16, 16448, 15.24),
    ],
)
def test_floors_of_decode(shape, batch, context, want):
    found = 1000 * decode_floor_s(gpu.SHAPES[shape], batch, context)
    assert found == pytest.approx(want, rel=0.01)


@pytest.mark.parametrize(
    ("shape", "count", "length", "want"),
    [
        ("8B", 1, 8192, 167),
        ("8B", 8, 4096, 625),
        ("0.6B", 8, 4096, 56.1),
        ("30B-A3B", 8, 4096, 294),
    ],
)
def test_floors_of_prefill(shape, count, length, want):
    found = 1000 * count * prefill_floor_s(gpu.SHAPES[shape], length)
    assert found == pytest.approx(want, rel=0.01)


def test_names_that_other_scripts_use():
    assert set(gpu.__all__) == {"Engine", "SHAPES", "SETTINGS"}
    assert gpu.SETTINGS["max_num_seqs"] == 512
    assert set(gpu.WORK) == set(gpu.SHAPES)


def test_covered_time_is_that_of_a_union():
    rng = random.Random(5)
    for _ in range(200):
        intervals = [(low, low + rng.randrange(8)) for low in rng.choices(range(40), k=9)]
        begin, end = sorted(rng.choices(range(50), k=2))
        cells = {cell for low, high in intervals for cell in range(low, high)}
        assert covered(intervals) == len(cells)
        assert covered(intervals, begin, end) == len(cells & set(range(begin, end)))


def test_a_row_that_fails_leaves_the_others(capsys):
    rows = Rows()

    def broken():
        raise ValueError("no\nroom")

    assert rows.run("one", lambda: {"figure": 1, "failures": []})
    assert rows.exit_code == 0
    assert not rows.run("two", broken)
    assert not rows.run("three", lambda: {"failures": ["wrong"]})
    assert rows.run("four", dict)
    one, two, three, four = printed(capsys)
    assert one == {"row": "one", "figure": 1, "failures": []}
    assert two["error"] == "ValueError: no room"
    assert Path(two["at"].rpartition(":")[0]).name == "test_gpu_benchmark.py"
    assert three["failures"] == ["wrong"]
    assert four == {"row": "four"}
    assert (rows.num_failed, rows.exit_code) == (2, 1)


def test_rows_after_the_limit_are_listed(capsys):
    rows = Rows(limit_s=0)
    assert not rows.run("late", lambda: pytest.fail("it ran"))
    assert rows.run("in the end", dict, is_conclusion=True)
    assert printed(capsys) == [
        {"row": "late", "not_run": "the time is over"},
        {"row": "in the end"},
    ]
    assert rows.exit_code == 3
    assert Rows().left_s() is None


def test_gaps_are_the_conformance_kit_s():
    source = Path(gpu.__file__).parents[1] / "cardan/testing/conformance/model_truth.py"
    [gaps] = [
        ast.literal_eval(node.value)
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.Assign) and node.targets[0].id == "GAPS"
    ]
    assert gaps == GAPS


TABLES = [{1: -0.1, 2: -3.0}, {4: -0.7, 5: -0.7004, 6: -2.0}, {7: -0.2}]


@pytest.mark.parametrize(
    ("ids", "fault"),
    [
        ([1, 4, 7], None),
        ([1, 5, 9], None),  # a tie, and what follows it is another story
        ([1, 6, 7], "answer: token 1 is 6 instead of 4, which is 1.3 likelier"),
        ([2, 4, 7], "answer: token 0 is 2 instead of 1"),
        ([3, 4, 7], "which is inf likelier"),
        ([1, 4], "answer: 2 tokens instead of 3"),
    ],
)
def test_first_difference_of_answers_must_be_a_tie(ids, fault):
    found = Agreement("float32")
    found.answer("answer", (ids, []), ([1, 4, 7], TABLES))
    assert found.ties == (5 in ids)
    assert found.widest == pytest.approx(0.0004 if 5 in ids else 0)
    if fault is None:
        assert not found.failures
    else:
        assert fault in found.failures[0]


def test_tables_are_compared_where_both_know_a_token():
    found = Agreement("bfloat16")
    found.table("here", {1: -1.0, 2: -2.0, 9: -9.0}, {1: -1.2, 2: -2.1, 3: -3.0})
    assert (found.count, found.failures) == (2, [])
    assert found.worst == pytest.approx(0.2)
    assert "off by 0.15 in the mean" in found.fields()["failures"][0]
    found.table("there", {1: -1.0}, {1: -2.0})
    assert "there: the log-probability of 1 is -1 instead of -2" in found.failures[0]
    found.table("nowhere", {1: float("nan")}, {1: -2.0})
    assert "nowhere" in found.failures[1]


STEPS = '{"steps": 12, "layers_not_run": 1, "failures": []}\n'


@pytest.mark.parametrize(
    ("err", "figure"),
    [
        ("========= ERROR SUMMARY: 0 errors\n", 0),
        ("========= Invalid __global__ read\n========= ERROR SUMMARY: 3 errors\n", 3),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", 0),
        ("========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)\n", 2),
    ],
)
def test_what_a_sanitizer_says(err, figure):
    row = sanitize.judged(0, STEPS, err, is_tool=True)
    assert (row["figure"], row["steps"], row["layers_not_run"]) == (figure, 12, 1)
    assert bool(row["failures"]) == bool(figure)


def test_a_sanitizer_that_says_nothing_is_an_error():
    with pytest.raises(RuntimeError, match="exit code 7: Device not supported"):
        sanitize.judged(7, "", "Device not supported", is_tool=True)
    with pytest.raises(RuntimeError, match="exit code 0"):
        sanitize.judged(0, STEPS, "", is_tool=True)
    assert sanitize.judged(0, STEPS, "", is_tool=False)["figure"] == 0


def test_a_missing_sanitizer_is_said():
    row = sanitize.row(None, "memcheck", "cpu", 60.0)
    assert row["skipped"] == "compute-sanitizer is not installed"


def test_a_start_that_fails_says_why(tmp_path):
    with pytest.raises(RuntimeError, match=r"exit code 1: .* no such file or directory"):
        start.start(tmp_path / "nowhere", {"platform": "cpu"}, tmp_path, None)


def output(*samples, prompt_logprobs=None):
    outputs = [
        SimpleNamespace(token_ids=[1] * count, finish_reason=reason, logprobs=[{}] * tables)
        for count, reason, tables in samples
    ]
    return SimpleNamespace(
        outputs=outputs, prompt_logprobs=prompt_logprobs, prompt_token_ids=[1, 2, 3]
    )


@pytest.mark.parametrize(
    ("found", "settings", "aborted", "fault"),
    [
        (output((5, "length", 0)), {}, False, ""),
        (output((4, "length", 0)), {}, False, "4 of 5 tokens came, finish_reason length"),
        (output((2, "abort", 0)), {}, True, ""),
        (output((5, "length", 0)), {}, True, ""),
        (output((2, "abort", 0)), {}, False, "2 of 5 tokens came, finish_reason abort"),
        (output((5, "length", 0)), {"n": 2}, False, "1 samples came"),
        (output((5, "length", 5)), {"logprobs": 0}, False, ""),
        (output((5, "length", 4)), {"logprobs": 0}, False, "4 tables of log-probabilities"),
        (output((5, "length", 0)), {"prompt_logprobs": 2}, False, "the prompt's"),
        (output((5, "length", 0), prompt_logprobs=[0] * 3), {"prompt_logprobs": 2}, False, ""),
    ],
)
def test_what_is_wrong_with_an_output(found, settings, aborted, fault):
    said = fault_of(found, 5, settings, is_aborted=aborted)
    assert said.startswith(fault)
    assert bool(said) == bool(fault)


def words(count, lengths):
    """Texts of the made-up tokenizer's words, instead of English ones."""
    rng = random.Random(count)
    sizes = [1 + lengths[place % len(lengths)] // 20 for place in range(count)]
    return [" ".join(f"t{rng.randrange(3, 500)}" for _ in range(size)) for size in sizes]


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A tiny model with made-up weights, and what the CPU platform says of it, in a file."""
    model, file = tmp_path / "model", tmp_path / "truth.json"
    model.mkdir()
    write_model(gpu.SHAPES["tiny"], model)
    monkeypatch.setitem(truth.SETTINGS, "load_format", "dummy")
    monkeypatch.setattr(truth, "_passages", words)
    truth.Truth.computed(str(model)).save(file)
    return str(model), file


def test_parity_on_the_cpu(tiny, capsys):
    model, file = tiny
    rows = Rows()
    parity.run_parity_rows(rows, model, "cpu", file, dtypes=("float32",))
    found = {row["row"]: row for row in printed(capsys)}
    assert rows.exit_code == 0, found
    assert found.keys() == {
        "parity truth",
        *(f"parity float32, {variant}" for variant in parity.VARIANTS),
        *(f"parity float32, {way}" for way in ("alone", "prefix cached")),
        "parity float32, seeded alone and in a batch",
    }
    assert found["parity float32, preempted"]["preemptions"] > 0
    assert found["parity float32, prefix cached"]["cached_tokens"][1] > 0
    assert found["parity float32, as it comes"]["compared"] > 20 * truth.ANSWER
    assert "0 steps ahead" in found["parity float32, one step ahead"]["skipped"]


def test_parity_sees_a_wrong_token_and_another_model(tiny, capsys, monkeypatch):
    model, file = tiny
    recorded = json.loads(file.read_text())
    recorded["answers"][3][0][2] += 1
    recorded["answers"][3][1][2][0][0] += 1
    file.write_text(json.dumps(recorded))
    rows = Rows()
    monkeypatch.setattr(parity, "VARIANTS", {"without graphs": {"enforce_eager": True}})
    parity.run_parity_rows(rows, model, "cpu", file, dtypes=("float32",))
    [_, row] = printed(capsys)
    assert row["figure"] == 1
    assert "prompt 3: token 2 is" in row["failures"][0]
    file.write_text(json.dumps({**recorded, "digest": "0"}))
    parity.run_parity_rows(rows, model, "cpu", file)
    [row] = printed(capsys)
    assert "was recorded of another file" in row["error"]


def test_steps_for_a_sanitizer(monkeypatch):
    """Two layers on the platform's plainest backend, with its first kernels for rotations."""
    cases = sanitized_steps.layer_cases(("float32",), ())
    kept = {name: cases[name] for name in ("float32", "cache in int8")}
    native = [item for item in CpuPlatform().kernels(None) if "native" in item.name]
    monkeypatch.setattr(sanitized_steps, "layer_cases", lambda *dtypes: kept)
    monkeypatch.setattr(CpuPlatform, "attention", lambda self, info: (CpuAttention,))
    monkeypatch.setattr(CpuPlatform, "kernels", lambda self, info: native)
    found = sanitized_steps.run("cpu", time.monotonic() + 1000)
    # Of each layer three steps, and one with each of two rotations.
    assert found == {"steps": 10, "layers_not_run": 0, "failures": []}
    late = sanitized_steps.run("cpu", time.monotonic())
    assert late == {"steps": 0, "layers_not_run": 2, "failures": []}
