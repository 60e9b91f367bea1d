"""Log-probabilities of sampled tokens and of prompts, against float64."""

import numpy as np
import pytest
import torch
from sampling_helpers import make, new_row, random_logits, sample

from cardan.core.types.sampling_params import SamplingParams

V = 40


@pytest.mark.parametrize("k", [0, 1, 5, -1])
def test_logprobs_are_those_of_the_model(k):
    settings = {"temperature": 0.4, "top_k": 3, "logit_bias": {4: 9.0}, "presence_penalty": 2.0}
    rows = [
        new_row(0, SamplingParams(logprobs=k, **settings), [1, 4], 1, seed=1),
        new_row(1, SamplingParams(), [1]),
        new_row(2, SamplingParams(logprobs=2, temperature=0), [1]),
        new_row(3, SamplingParams(logprobs=k), [1], seed=3),
    ]
    logits = random_logits(4, 12)
    truth = logits.astype(np.float64)
    truth = truth - np.log(np.exp(truth).sum(-1, keepdims=True))
    result = sample(make(V, rows), logits, [0, 1, 2, 3], [1, 0, 0, 0])
    assert set(result.logprobs) == {0, 2, 3}
    for i, size in ((0, k % (V + 1)), (2, 2), (3, k % (V + 1))):
        table = result.logprobs[i]
        assert table.token_ids.shape == table.logprobs.shape == (1, 1 + size)
        ids = table.token_ids[0]
        assert ids[0] == result.token_ids[i]
        assert ids[1:].tolist() == np.argsort(-truth[i], kind="stable")[:size].tolist()
        np.testing.assert_allclose(table.logprobs[0], truth[i][ids], atol=1e-5)
        assert table.ranks.tolist() == [1 + int((truth[i] > truth[i][ids[0]]).sum())]


def test_logprobs_of_the_whole_batch_are_not_touched_by_sampling():
    rows = [new_row(i, SamplingParams(logprobs=0, top_p=p), [1]) for i, p in ((0, 1.0), (1, 0.3))]
    logits = random_logits(2, 13)
    truth = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    result = sample(make(V, rows), logits, [0, 1])
    for i in range(2):
        value = result.logprobs[i].logprobs[0, 0]
        assert value == pytest.approx(truth[i, result.token_ids[i]], abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prompt_logprobs(dtype, monkeypatch):
    monkeypatch.setattr("cardan.core.sampling.logprobs._CHUNK_BYTES", 4 * V * 7)
    logits = torch.tensor(random_logits(23, 14)).to(dtype)
    tokens = torch.tensor(np.random.default_rng(0).integers(0, V, 23))
    wide = logits.double().numpy()
    truth = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    kit = make(V)
    for k in (0, 4, -1):
        table = kit.sampler.prompt_logprobs(logits, tokens, k)
        assert table.token_ids.shape == (23, 1 + (V if k == -1 else k))
        assert table.token_ids[:, 0].tolist() == tokens.tolist()
        np.testing.assert_allclose(
            table.logprobs, np.take_along_axis(truth, table.token_ids.astype(int), 1), atol=1e-5
        )
        for i, token in enumerate(tokens.tolist()):
            assert table.ranks[i] == 1 + (wide[i] > wide[i, token]).sum()
    assert kit.sampler.prompt_logprobs(logits[:0], tokens[:0], 2).token_ids.shape == (0, 3)
