"""The sampling operations against NumPy, brute force and Hugging Face's warpers."""

import numpy as np
import pytest
import torch
from sampling_helpers import oracle_filter

from cardan.core.ops.compare import compare_case, reference_kernel
from cardan.core.ops.reference.sampling_draw import greedy_tokens, sample_tokens
from cardan.core.ops.reference.sampling_edits import apply_penalties, apply_token_mask
from cardan.core.ops.reference.sampling_filters import apply_min_p_top_k_top_p
from cardan.core.ops.reference.sampling_logprobs import token_logprobs
from cardan.core.ops.reference.sampling_ops import SAMPLING_OPS

OPS = {spec.name: spec for spec in SAMPLING_OPS}
VOCABULARIES = (1, 2, 5, 255, 256, 257, 1000, 4099)


def rng_logits(vocab_size, num_rows=4, seed=0, ties=False, masked=False, spread=3.0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((num_rows, vocab_size)) * spread
    if ties:
        x = np.round(x)
    if masked and vocab_size > 4:
        x[:, rng.random(vocab_size) < 0.4] = -np.inf
        x[:, vocab_size // 2] = 0.5
    return torch.tensor(x, dtype=torch.float32)


def kept_sets(logits):
    return [set(np.flatnonzero(np.isfinite(row)).tolist()) for row in logits.numpy()]


def filtered(x, top_k=0, top_p=1.0, min_p=0.0, dtype=torch.float64):
    n = len(x)
    args = (torch.full((n,), top_k), torch.full((n,), top_p, dtype=dtype))
    before = x.clone()
    out = apply_min_p_top_k_top_p(x, *args, torch.full((n,), min_p, dtype=dtype))
    assert torch.equal(x, before)
    for old, new in zip(x, out, strict=True):
        assert torch.equal(new[new.isfinite()], old[new.isfinite()])
    return kept_sets(out)


@pytest.mark.parametrize("spec", SAMPLING_OPS, ids=lambda spec: spec.name)
def test_body_agrees_with_its_float64_run_on_its_own_inputs(spec):
    for seed in range(3):
        for case in spec.make_inputs(torch.float32, torch.device("cpu"), seed):
            body = reference_kernel(spec, OPS)
            found = compare_case(spec, body, case, OPS, spec.tolerances["float32"])
            assert found.ok, found
            assert case.attributes["dtype"] == "float32"
            assert case.attributes["vocab_size"] == case.args[0].shape[1]


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_greedy_takes_the_lowest_of_the_largest(vocab_size):
    for x in (rng_logits(vocab_size), rng_logits(vocab_size, ties=True, masked=True, spread=1)):
        assert greedy_tokens(x).tolist() == np.argmax(x.numpy(), -1).tolist()
    same = torch.zeros(2, vocab_size)
    assert greedy_tokens(same).tolist() == [0, 0]
    assert greedy_tokens(same - torch.inf).tolist() == [0, 0]
    same[1, vocab_size - 1] = torch.nan
    assert greedy_tokens(same).tolist() == [0, vocab_size - 1]


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@pytest.mark.parametrize("wide", [torch.float64, torch.float32])
def test_sample_inverts_the_distribution_function(vocab_size, wide):
    rng = np.random.default_rng(vocab_size)
    x = rng_logits(vocab_size, num_rows=64, masked=True, seed=7)
    uniform = rng.random(64)
    tokens = sample_tokens(x, torch.tensor(uniform, dtype=wide)).numpy()
    weights = np.exp(x.double().numpy() - x.double().numpy().max(-1, keepdims=True))
    edges = np.cumsum(weights, -1) / weights.sum(-1, keepdims=True)
    for row in range(64):
        assert weights[row, tokens[row]] > 0
        low = edges[row, tokens[row] - 1] if tokens[row] else 0.0
        assert low - 1e-6 <= uniform[row] <= edges[row, tokens[row]] + 1e-6


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53, 1.0])
def test_sample_never_returns_an_impossible_token(uniform):
    for vocab_size in (3, 257, 49152):
        x = torch.full((3, vocab_size), -torch.inf)
        x[0, 1] = -500.0
        x[1, vocab_size - 2] = 3e38
        x[2, 1], x[2, vocab_size - 2] = 0.0, -60.0
        tokens = sample_tokens(x, torch.full((3,), uniform, dtype=torch.float64)).tolist()
        assert tokens[:2] == [1, vocab_size - 2]
        assert tokens[2] in (1, vocab_size - 2)


def test_sample_survives_rows_without_a_distribution():
    x = rng_logits(300, num_rows=3)
    x[0], x[1, 5] = -torch.inf, torch.nan
    alone = sample_tokens(x[2:], torch.tensor([0.3], dtype=torch.float64))
    tokens = sample_tokens(x, torch.tensor([0.3, 0.3, 0.3], dtype=torch.float64))
    assert ((tokens >= 0) & (tokens < 300)).all()
    assert tokens[2] == alone[0]


def test_sample_error_stays_small_in_a_huge_vocabulary():
    # Uniform weights: token = floor(u * V), the worst case for a running float32 sum.
    uniform = torch.tensor(np.random.default_rng(0).random(24))
    tokens = sample_tokens(torch.zeros(24, 262144), uniform)
    assert tokens.tolist() == (uniform * 262144).long().tolist()


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("vocab_size", [1, 2, 40, 300, 2500])
def test_filters_alone_and_together_against_the_oracle(vocab_size, ties):
    x = rng_logits(vocab_size, ties=ties, masked=True, num_rows=3, seed=vocab_size)
    for top_k in (0, 1, 2, 7, 130, 1100, vocab_size, vocab_size + 1):
        for top_p in (1.0, 0.93, 0.31, 1e-4):
            for min_p in (0.0, 0.037):
                truth = [oracle_filter(row, top_k, top_p, min_p) for row in x.double().numpy()]
                assert filtered(x, top_k, top_p, min_p) == truth, (top_k, top_p, min_p)


def test_filters_mixed_over_rows_equal_each_row_alone():
    x = rng_logits(3000, num_rows=12, ties=True, spread=2)
    top_k = torch.tensor([0, 5, 0, 0, 2000, 1, 0, 300, 0, 9, 0, 64])
    top_p = torch.tensor([1, 1, 0.9, 1, 0.5, 1, 1e-9, 0.99, 0.2, 0.5, 0.999, 1]).double()
    min_p = torch.tensor([0, 0, 0, 0.1, 0, 0, 0, 0, 0.3, 1.0, 0, 0.01]).double()
    together = apply_min_p_top_k_top_p(x, top_k, top_p, min_p)
    for i in range(12):
        one = slice(i, i + 1)
        alone = apply_min_p_top_k_top_p(x[one], top_k[one], top_p[one], min_p[one])
        assert torch.equal(together[one], alone)
        args = (int(top_k[i]), float(top_p[i]), float(min_p[i]))
        assert kept_sets(alone) == [oracle_filter(x[i].double().numpy(), *args)]


def test_ties_at_the_last_place():
    x = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0]])
    assert filtered(x, top_k=2) == [{1, 2, 4}]  # top-k keeps all that tie, as transformers do
    assert filtered(x, top_k=1, top_p=0.5) == [{1, 2}]  # top-p takes no more than it needs
    assert filtered(x, top_p=0.01) == [{1}]  # the lowest id, like greedy decoding
    assert filtered(torch.zeros(1, 10), top_p=0.3) == [{0, 1, 2}]
    assert filtered(torch.zeros(1, 4000), top_p=0.5) == [set(range(2000))]


def test_flat_rows_fall_back_to_the_whole_order():
    x = rng_logits(20000, num_rows=3, spread=0.05)
    x[1] *= 200  # a peaked row between two flat ones
    assert filtered(x, top_p=0.9) == [oracle_filter(r, 0, 0.9, 0) for r in x.double().numpy()]


def test_filters_equal_the_warpers_of_transformers():
    from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    x = rng_logits(2000, num_rows=8, seed=3)
    for top_k, top_p, min_p in ((50, 0.9, 0.05), (7, 0.5, 0.2), (1500, 0.95, 0.001)):
        out = TopKLogitsWarper(top_k)(None, x)
        out = TopPLogitsWarper(top_p)(None, out)
        out = MinPLogitsWarper(min_p)(None, out)
        assert filtered(x, top_k, top_p, min_p) == kept_sets(out)
        assert filtered(x, top_k, top_p, min_p, dtype=torch.float32) == kept_sets(out)


def test_filters_survive_rows_without_a_distribution():
    x = rng_logits(2000, num_rows=3)
    x[0], x[1, 3] = -torch.inf, torch.nan
    n = torch.ones(3)
    out = apply_min_p_top_k_top_p(x, torch.tensor([5, 5, 5]), n.double() * 0.9, n.double() * 0.1)
    assert torch.equal(
        out[2:],
        apply_min_p_top_k_top_p(
            x[2:], torch.tensor([5]), n[:1].double() * 0.9, n[:1].double() * 0.1
        ),
    )


def penalised(x, index, slots, *history):
    out = x.clone()
    apply_penalties(out, index, slots, *history)
    return out


def test_penalties_against_loops_and_transformers():
    from transformers import RepetitionPenaltyLogitsProcessor

    rng = np.random.default_rng(5)
    x = rng_logits(500, num_rows=5, masked=True)
    prompt = torch.tensor(rng.random((4, 500)) < 0.1)
    counts = torch.tensor(rng.integers(-6, 4, (4, 500)).clip(0), dtype=torch.int32)
    factors = torch.tensor([[1.3, 0.7, 1.0], [0.5, -1.0, 0.0], [0.25, 1.5, 0.0]])
    r, p, f = factors
    index, slots = torch.tensor([4, 0, 1]), torch.tensor([3, 1, 0])
    out = penalised(x, index, slots, prompt, counts, factors)
    for i, (row, slot) in enumerate(zip(index.tolist(), slots.tolist(), strict=True)):
        for t in range(500):
            value = float(x[row, t])
            if prompt[slot, t] or counts[slot, t]:
                value = value / float(r[i]) if value > 0 else value * float(r[i])
            value -= int(counts[slot, t]) * float(f[i])
            value -= float(p[i]) if counts[slot, t] else 0.0
            assert float(out[row, t]) == pytest.approx(value, abs=1e-5)
    assert torch.equal(out[2:4], x[2:4])
    assert torch.equal(penalised(x[index], None, slots, prompt, counts, factors), out[index])
    ids = torch.tensor(rng.integers(0, 500, (1, 30)))
    seen = torch.zeros(1, 500, dtype=torch.bool).scatter_(1, ids, True)
    first, only = torch.zeros(1, dtype=torch.int64), torch.tensor([[1.7], [0.0], [0.0]])
    ours = penalised(x[:1], None, first, seen, counts[:1] * 0, only)
    torch.testing.assert_close(ours, RepetitionPenaltyLogitsProcessor(1.7)(ids, x[:1].clone()))


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 100, 1000])
def test_token_mask_bit_by_bit(vocab_size):
    rng = np.random.default_rng(vocab_size)
    x = rng_logits(vocab_size)
    bits = rng.integers(-(2**31), 2**31, (4, -(-vocab_size // 32))).astype(np.int32)
    out = apply_token_mask(x, torch.tensor(bits))
    for i in range(4):
        for t in range(vocab_size):
            allowed = (int(bits[i, t // 32]) >> (t % 32)) & 1
            assert out[i, t] == (x[i, t] if allowed else -torch.inf)


@pytest.mark.parametrize("vocab_size", [1, 33, 1000, 49152])
@pytest.mark.parametrize("ties", [False, True])
def test_logprobs_against_float64(vocab_size, ties):
    x = rng_logits(vocab_size, ties=ties, masked=True, seed=11)
    x[x == 0] = torch.tensor([0.0, -0.0])[torch.arange(int((x == 0).sum())) % 2]
    tokens = torch.tensor([0, vocab_size - 1, vocab_size // 2, vocab_size // 3])
    wide = x.double().numpy()
    top = wide.max(-1, keepdims=True)
    truth = wide - top - np.log(np.exp(wide - top).sum(-1, keepdims=True))
    for k in {0, 1, min(5, vocab_size), min(20, vocab_size), min(2000, vocab_size)}:
        ids, values, logprob, rank = token_logprobs(x, tokens, k)
        for i in range(4):
            order = np.lexsort((np.arange(vocab_size), -wide[i]))[:k]
            assert ids[i].tolist() == order.tolist()
            np.testing.assert_allclose(values[i].numpy(), truth[i, order], atol=2e-5)
            np.testing.assert_allclose(float(logprob[i]), truth[i, tokens[i]], atol=2e-5)
            assert int(rank[i]) == 1 + int((wide[i] > wide[i, tokens[i]]).sum())


def test_logprobs_of_a_greedy_token_rank_first():
    x = torch.round(rng_logits(4096, num_rows=16, spread=1.0))
    tokens = greedy_tokens(x)
    ids, values, logprob, rank = token_logprobs(x, tokens, 3)
    assert torch.equal(ids[:, 0], tokens)
    assert torch.equal(values[:, 0], logprob)
    assert (rank == 1).all()


def test_a_row_gives_the_same_bits_alone_and_in_a_batch():
    for vocab_size in (1000, 49152):
        x = rng_logits(vocab_size, num_rows=17)
        uniform = torch.rand(17, dtype=torch.float64)
        together = sample_tokens(x, uniform)
        tables = token_logprobs(x, together, 5)
        for i in range(17):
            one = slice(i, i + 1)
            assert sample_tokens(x[one], uniform[one]) == together[i]
            alone = token_logprobs(x[one].clone(), together[one], 5)
            for a, b in zip(alone, tables, strict=True):
                assert torch.equal(a[0], b[i])
