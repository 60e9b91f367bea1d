"""Every architecture against transformers in float32."""

import pytest
import torch
from model_helpers import Batch, Sequence, load_model

from cardan.testing.tiny_models import CASES, VOCAB_SIZE, make_tiny_model, prompt_ids

LENGTH = 40


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory):
    """(transformers' model, ours)."""
    directory = tmp_path_factory.mktemp(request.param)
    theirs = make_tiny_model(request.param, directory)
    return theirs, load_model(directory)


@torch.inference_mode()
def reference_logits(model, token_ids):
    return model(torch.tensor([token_ids]), use_cache=False).logits[0]


def assert_same_logprobs(ours, theirs):
    torch.testing.assert_close(ours.log_softmax(-1), theirs.log_softmax(-1), atol=1e-4, rtol=0)


def test_prefill(pair):
    theirs, ours = pair
    token_ids = prompt_ids(LENGTH)
    expected = reference_logits(theirs, token_ids)
    logits = Sequence(ours).extend(token_ids)
    assert logits.dtype == torch.float32
    assert logits.shape == (LENGTH, VOCAB_SIZE)
    # A degenerate model would agree with anything.
    assert len(set(expected.argmax(-1).tolist())) > LENGTH // 4
    assert_same_logprobs(logits, expected)


def test_token_by_token(pair):
    theirs, ours = pair
    token_ids = prompt_ids(LENGTH, seed=1)
    sequence = Sequence(ours)
    logits = torch.cat([sequence.extend([token_id]) for token_id in token_ids])
    assert_same_logprobs(logits, reference_logits(theirs, token_ids))


def test_uneven_chunks(pair):
    theirs, ours = pair
    token_ids = prompt_ids(LENGTH, seed=2)
    sequence = Sequence(ours)
    logits = torch.cat(
        [sequence.extend(token_ids[a:b]) for a, b in [(0, 1), (1, 14), (14, 31), (31, LENGTH)]]
    )
    assert_same_logprobs(logits, reference_logits(theirs, token_ids))


def test_mixed_batches(pair):
    theirs, ours = pair
    first, second = prompt_ids(LENGTH, seed=4), prompt_ids(29, seed=5)
    batch = Batch(ours, num_rows=2)
    steps = [
        {0: first[:18]},
        {1: second[:21], 0: first[18:19]},
        {0: first[19:30], 1: second[21:22]},
        {0: first[30:], 1: second[22:]},
    ]
    results = [batch.step(step) for step in steps]
    for row, token_ids in enumerate((first, second)):
        logits = torch.cat([result[row] for result in results if row in result])
        assert_same_logprobs(logits, reference_logits(theirs, token_ids))


def test_greedy_tokens(pair):
    theirs, ours = pair
    prompt = prompt_ids(20, seed=3)
    with torch.inference_mode():
        expected = theirs.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=32,
            do_sample=False,
            eos_token_id=None,
        )[0, len(prompt) :].tolist()
    sequence = Sequence(ours)
    chosen: list[int] = []
    pending = prompt
    for _ in range(32):
        chosen.append(int(sequence.extend(pending)[-1].argmax()))
        pending = chosen[-1:]
    assert chosen == expected
