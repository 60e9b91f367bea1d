"""Level L6: floors and medians against sums made by hand, its rows in reports, and a run of it."""

import json

import pytest
import torch

from cardan.core.interfaces.roofline import Roofline
from cardan.testing.conformance.report import as_markdown, as_table, build_document
from cardan.testing.conformance.results import KitResult, LevelCount, level_reached
from cardan.testing.conformance.run import KitRun, command
from cardan.testing.conformance.speed import (
    SpeedRow,
    Work,
    dense_llama_work,
    measure,
    summary,
)
from cardan.testing.conformance.subject import resolve_subject

PEAKS = Roofline(bytes_per_s=100.0, flop_per_s={"float32": 50.0}, source="a data sheet")


def row(num_bytes=200, flop=25, dtype="float32", roofline=PEAKS, what="w"):
    work = Work(num_bytes=num_bytes, flop=flop, dtype=dtype)
    return SpeedRow(what=what, work=work, median_s=4.0, spread=0.25, roofline=roofline)


@pytest.mark.parametrize(
    ("changes", "floor", "limit"),
    [
        ({}, 2.0, "memory"),
        ({"flop": 150}, 3.0, "products"),
        ({"flop": 150, "dtype": "int8"}, 2.0, "memory"),
        ({"roofline": Roofline(source="")}, None, ""),
        ({"roofline": None}, None, ""),
    ],
)
def test_floor(changes, floor, limit):
    facts = row(**changes).facts
    assert (facts["floor_s"], facts["limit"]) == (floor, limit)
    assert facts["ratio"] == (None if floor is None else floor / 4.0)
    json.dumps(facts)


def test_summary_is_the_median_and_half_the_distance_of_the_quartiles():
    assert summary([5.0, 1.0, 2.0, 3.0, 4.0]) == (3.0, pytest.approx(1 / 3))
    assert summary([2.0, 2.0]) == (2.0, 0.0)


def test_measuring_waits_once_a_sample():
    calls, waits = [], []
    median, spread = measure(lambda: calls.append(len(waits)), lambda: waits.append(0))
    assert median > 0
    assert spread >= 0
    assert len(calls) > len(waits) > 9


def test_work_of_a_llama_step():
    """Against the parameters of transformers' model, counted there."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "vocab_size": 100,
    }
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**config, tie_word_embeddings=False))
    sizes = {name: p.numel() for name, p in model.named_parameters() if p.ndim == 2}
    table = sizes.pop("model.embed_tokens.weight")
    work = dense_llama_work(config, "float32", 4, tokens=10, rows=3, context=7)
    cached = 3 * 7 * 2 * 2 * (2 * 8)
    assert work.num_bytes == 4 * (sum(sizes.values()) + cached)
    head = sizes["lm_head.weight"]
    assert head == table
    assert work.flop == 2 * (10 * (sum(sizes.values()) - head) + 3 * head)


def test_rows_in_reports():
    rows = [row(what="fast one").facts, row(what="slow one", roofline=None).facts]
    result = KitResult(level="L6", id="s::x", title="X", outcome="passed", facts={"speed": rows})
    document = build_document(resolve_subject("cpu"), [result], 7, is_interrupted=False)
    table = as_table(document)
    lines = [line.split() for line in table.splitlines()]
    assert ["fast", "one", "4", "s", "±25%", "2", "s", "50.0%", "memory"] in lines
    assert ["slow", "one", "4", "s", "±25%", "unknown"] in lines
    assert "floors: a data sheet" in table
    assert "L6 was measured; it is reached where L0 to L5 run with it" in table
    assert "fast one" in as_markdown(document)
    assert "| L6 speed floors |" in as_markdown(document)


def test_l6_is_reached_where_something_was_measured():
    below = [LevelCount(f"L{n}", 1, 0, 0) for n in range(6)]
    assert level_reached([*below, LevelCount("L6", 2, 0, 5)]) == "L6"
    assert level_reached([*below, LevelCount("L6", 0, 0, 5)]) == "L5"
    assert level_reached([*below, LevelCount("L6", 2, 1, 0)]) == "L5"


def test_badge_option():
    assert "--cardan-badge=b.svg" in command(KitRun(spec="cpu", badge_file="b.svg"))
