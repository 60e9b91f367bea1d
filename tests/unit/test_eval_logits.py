"""Divergences of logits against a NumPy float64 oracle, in whatever parts they are shown."""

import numpy as np
import pytest
import torch

from cardan.eval import logits as logits_module
from cardan.eval.logits import Comparison, LogitsOfWindow, divergence, same_top_token
from cardan.eval.windows import Window

V = 37


def oracle(base, other):
    """KL(base || other) of float64 logits [n, V]."""

    def log_softmax(rows):
        shifted = rows - rows.max(-1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))

    p, q = log_softmax(base), log_softmax(other)
    return (np.exp(p) * (p - q)).sum(-1)


def make_logits(count, seed):
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 3, (count, V)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_divergence(dtype):
    base, other = make_logits(50, 0).to(dtype), make_logits(50, 1).to(dtype)
    expected = oracle(base.double().numpy(), other.double().numpy())
    np.testing.assert_allclose(divergence(base, other).numpy(), expected, rtol=1e-9, atol=1e-12)
    assert divergence(base, base).tolist() == [0.0] * 50


def test_tiny_divergences_keep_their_digits():
    base = make_logits(50, 0)
    other = base + 1e-4 * make_logits(50, 1)
    # Second order: half the variance of the difference under the base.
    p = torch.softmax(base, -1)
    difference = other - base
    mean = (p * difference).sum(-1, keepdim=True)
    expected = (p * (difference - mean) ** 2).sum(-1) / 2
    np.testing.assert_allclose(divergence(base, other).numpy(), expected.numpy(), rtol=2e-3)


def test_tokens_that_are_ruled_out():
    out = -torch.inf
    base = torch.tensor([[0.0, 0.0, out], [0.0, 0.0, out], [0.0, 0.0, 0.0]])
    other = torch.tensor([[0.0, 0.0, out], [0.0, 0.0, 0.0], [0.0, 0.0, out]])
    found = divergence(base, other).tolist()
    assert found[0] == 0.0
    assert found[1] == pytest.approx(np.log(3 / 2))
    assert found[2] == np.inf


def test_same_top_token():
    base = torch.tensor([[1.0, 2.0, 0.0], [1.0, 2.0, 0.0], [1.0, 2.0, 0.0]])
    other = torch.tensor([[0.0, 5.0, 1.0], [5.0, 0.0, 1.0], [5.0, 5.0, 1.0]])
    assert same_top_token(base, other).tolist() == [True, False, True]


@pytest.mark.parametrize("part_bytes", [1, 8 * V * 3, 1 << 20])
@pytest.mark.parametrize("chunks", [(12,), (5, 7), (3, 1, 8), (1,) * 12])
@pytest.mark.parametrize("first", [1, 4, 11])
def test_windows_shown_in_chunks(first, chunks, part_bytes, monkeypatch):
    """Base and model may be chunked differently; a preempted window shows positions twice."""
    monkeypatch.setattr(logits_module, "_PART_BYTES", part_bytes)
    base, other = make_logits(12, 2).float(), make_logits(12, 3).float()
    window = Window(tuple(range(13)), first)
    kept = LogitsOfWindow()
    comparison = Comparison(kept)
    kept.begin(window, V)
    for _ in range(2):
        for start, part in zip((0, 8), base.split(8), strict=True):
            kept.show(1, start, part)
    comparison.begin()
    assert np.isnan(comparison.divergences).all()
    start = 0
    for part in other.split(chunks):
        comparison.show(1, start, part)
        start += len(part)
    expected = oracle(base.double().numpy(), other.double().numpy())[first - 1 :]
    np.testing.assert_allclose(comparison.divergences, expected, rtol=1e-9)
    tops = base.argmax(-1) == other.argmax(-1)
    assert comparison.same_top.tolist() == tops[first - 1 :].tolist()


def test_a_shorter_window_after_a_longer_one():
    kept = LogitsOfWindow()
    kept.begin(Window(tuple(range(9)), 4), V)
    assert kept.num_rows == 5
    kept.begin(Window(tuple(range(4)), 2), V)
    assert kept.num_rows == 2
    rows = make_logits(3, 5).float()
    kept.show(7, 0, rows)
    assert torch.equal(kept.rows(0, 2), rows[1:])
