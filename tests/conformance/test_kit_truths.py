"""The kit's own truths, against independent ones."""

import numpy as np
import pytest
import torch

from cardan.core.interfaces.attention import KVLayout, LayerParams
from cardan.core.types.outputs import CompletionOutput, Logprob
from cardan.testing.conformance.attention_truth import attend_row, error_text
from cardan.testing.conformance.model_truth import ModelTruth
from cardan.testing.conformance.op_cases import same_bits
from cardan.testing.conformance.paged_batches import (
    Geometry,
    PagedBatch,
    Placement,
    logical_cache,
)
from cardan.testing.conformance.paged_steps import PagedSteps


def test_formula_equals_torch():
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(9, heads, 8, generator=generator, dtype=torch.float64) for heads in (6, 2, 2)
    )
    out, lse = attend_row(q[4:], k, v, LayerParams(scale=0.3))
    heads_first = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    want = torch.nn.functional.scaled_dot_product_attention(
        *heads_first, is_causal=True, scale=0.3, enable_gqa=True
    )
    np.testing.assert_allclose(out, want[0].transpose(0, 1)[4:].numpy(), rtol=1e-12)
    # The sum of a token that sees one key is that key's score.
    _, first = attend_row(q[:1], k[:1], v[:1], LayerParams(scale=0.3))
    np.testing.assert_allclose(first[0, 4], 0.3 * float(q[0, 4] @ k[0, 1]), rtol=1e-12)
    assert lse.shape == (5, 6)


def test_features_of_formula():
    """One query over three keys, every weight by hand."""
    q = torch.ones(1, 1, 1)
    k = torch.tensor([[[0.5]], [[1.0]], [[-1.0]]])
    v = torch.tensor([[[1.0]], [[2.0]], [[4.0]]])
    layer = LayerParams(
        scale=2.0,
        window=2,
        softcap=1.5,
        sinks=torch.tensor([0.25]),
        alibi_slopes=torch.tensor([0.5]),
    )
    near, last = 1.5 * np.tanh(2.0 / 1.5) - 0.5, 1.5 * np.tanh(-2.0 / 1.5)
    total = np.exp(near) + np.exp(last) + np.exp(0.25)
    out, lse = attend_row(q, k, v, layer)
    np.testing.assert_allclose(out.item(), (2 * np.exp(near) + 4 * np.exp(last)) / total)
    np.testing.assert_allclose(lse.item(), np.log(total))


def test_error_names_the_worst_element():
    want = np.ones((3, 2))
    assert error_text(torch.ones(3, 2), want, 1e-6) == ""
    got = torch.ones(3, 2)
    got[1, 1] = torch.nan
    assert "1 of 3 tokens are off; at [1, 1]: nan instead of 1" in error_text(got, want, 1e-6)
    assert "shape" in error_text(torch.ones(2, 2), want, 1e-6)
    assert error_text(torch.ones(0, 2), np.ones((0, 2)), 1e-6) == ""


def test_bits():
    nan = torch.tensor([torch.nan])
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(torch.tensor([0.0]), torch.tensor([0.0], dtype=torch.float64))
    assert not same_bits(torch.zeros(2), torch.zeros(1, 2))


def test_steps_write_each_slot_once_and_use_blocks_again():
    steps = PagedSteps(Geometry(), 3, np.random.default_rng(0), Placement(padding=2))
    owners: dict[int, set[int]] = {}
    for _ in range(60):
        view = steps.begin()
        slots = view.slot_mapping.tolist()
        assert slots[-2:] == [-1, -1]
        assert len(set(slots[:-2])) == len(slots) - 2
        assert all(4 <= slot < steps.num_blocks * 4 for slot in slots[:-2])
        for row, length in enumerate(view.seq_lens_host):
            blocks = view.block_table[row, : -(-length // 4)].tolist()
            assert 0 not in blocks
            for block in blocks:
                owners.setdefault(block, set()).add(row)
        steps.finish(LayerParams(scale=1.0))
    assert any(len(rows) > 1 for rows in owners.values())


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3", "bfloat16"])
def test_caches_hold_other_dtypes(kv_dtype):
    layout = KVLayout(order=(1, 0, 2, 3, 4))
    geometry = Geometry(kv_dtype=kv_dtype)
    batch = PagedBatch(geometry, [(1, 7)], 0, Placement(layout=layout))
    assert batch.cache.dtype == geometry.cache_dtype
    logical = logical_cache(batch.cache, layout).float()
    blocks = batch.batch.block_table[0].tolist()
    for position in range(6):
        held = logical[blocks[position // 4], :, :, position % 4]
        assert torch.equal(held[0], batch.keys[0][position])
        assert torch.equal(held[1], batch.values[0][position])
    # Block 0, the spare ones and the slots of the step itself are nobody's.
    assert logical.isnan().any((1, 2, 4)).sum() == logical[:, 0, 0, :, 0].numel() - 6


def test_int8_caches_hold_numbers_and_scales():
    layout = KVLayout(order=(1, 0, 2, 3, 4))
    geometry = Geometry(kv_dtype="int8", k_dim=10, v_dim=6)
    batch = PagedBatch(geometry, [(1, 7)], 0, Placement(layout=layout))
    assert batch.cache.shape[-1] == 12 + 4
    logical = logical_cache(batch.cache, layout)
    scales = logical[..., 12:].contiguous().view(torch.float32)
    blocks = batch.batch.block_table[0].tolist()
    for position in range(6):
        place = blocks[position // 4], slice(None), slice(None), position % 4
        held = logical[place].float() * scales[place]
        for kind, part in enumerate((batch.keys, batch.values)):
            want = part[0][position]
            torch.testing.assert_close(held[kind, :, : want.shape[-1]], want)
    # What is nobody's reads as NaN.
    assert scales.isnan().all(2).sum() == 2 * (batch.num_blocks * 4 - 6)


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    return ModelTruth("llama", tmp_path_factory.mktemp("llama"))


def test_greedy_fault_names_the_token(truth):
    prompt, answer = [5, 6, 7], []
    for _ in range(5):
        answer.append(int(truth.logprobs([*prompt, *answer])[-1].argmax()))
    assert truth.greedy_fault(prompt, answer, 1e-3) == ""
    wrong = [*answer[:2], (answer[2] + 1) % 509]
    assert f"the truth is {answer[2]}" in truth.greedy_fault(prompt, wrong, 1e-3)


def test_logprobs_fault_names_the_token(truth):
    prompt = [9, 8, 7]
    row = truth.logprobs(prompt)[-1]
    best = int(row.argmax())

    def answer(table):
        return CompletionOutput(0, "", [best], logprobs=[table])

    right = {best: Logprob(float(row[best])), 4: Logprob(float(row[4]))}
    assert truth.logprobs_fault(prompt, answer(right), 1e-3) == ""
    off = {**right, 4: Logprob(float(row[4]) + 0.01)}
    assert "log-probability of 4" in truth.logprobs_fault(prompt, answer(off), 1e-3)
    del right[best]
    assert "likeliest" in truth.logprobs_fault(prompt, answer(right), 1e-3)
    nan = {best: Logprob(float("nan"))}
    assert truth.logprobs_fault(prompt, answer(nan), 1e-3)
