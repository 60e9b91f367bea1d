"""Sampling in programs against the core's sampler, whose definitions are in torch and float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from sampling_rows import SampledRows

from cardan.core.types.sampling_params import SamplingParams
from cardan.platforms.tpu.sampling import (
    Settings,
    choose_tokens,
    logprobs_table,
)

VOCABULARY = 1003

SETTINGS = {
    "greedy": {"temperature": 0},
    "plain": {},
    "hot": {"temperature": 1.9},
    "cold": {"temperature": 0.05},
    "top_k": {"top_k": 7},
    "top_k_of_one": {"top_k": 1},
    "top_p": {"top_p": 0.6},
    "tiny_top_p": {"top_p": 1e-4},
    "min_p": {"min_p": 0.2},
    "all": {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
}
EDITS = {
    "bias": {"logit_bias": {3: 5.0, 900: -100.0}},
    "allowed": {"allowed_token_ids": (1, 5, 77, 1002)},
    "min_tokens": {"min_tokens": 9},
    "repetition": {"repetition_penalty": 1.7},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": -0.7},
    "all": {
        "logit_bias": {4: 2.0},
        "min_tokens": 9,
        "repetition_penalty": 0.8,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.3,
    },
}


def logits_of(seed, num_rows, spread=4.0):
    numbers = np.random.default_rng(seed).standard_normal((num_rows, VOCABULARY))
    return (spread * numbers).astype(np.float32)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("ties", [False, True])
def test_draws_what_the_core_draws(name, ties):
    params = [SamplingParams(**SETTINGS[name])] * 16 + [SamplingParams(temperature=0)] * 3
    logits = logits_of(hash(name) % 1000, len(params))
    if ties:
        logits = np.round(logits)
    rows = SampledRows(params, VOCABULARY, seed=len(name))
    for _ in range(8):
        found, truth = rows.both(logits)
        # In float32 a draw may fall on the other side of a border of the distribution.
        assert (found != truth).sum() <= (1 if "greedy" not in name else 0)


def test_draws_follow_the_distribution():
    """A chi-squared test of 40,000 draws with other uniform numbers than the host would give."""
    logits = logits_of(5, 1, spread=1.0)[:, :20]
    num_draws = 40_000
    rng = np.random.default_rng(11)
    draw = jax.jit(choose_tokens)
    counts = np.zeros(20)
    for _ in range(10):
        size = num_draws // 10
        uniform = jnp.asarray(rng.random(size), jnp.float32)
        ones = jnp.ones(size, jnp.float32)
        settings = Settings(ones, jnp.zeros(size, jnp.int32), ones, 0 * ones, uniform)
        tokens = draw(jnp.tile(jnp.asarray(logits), (size, 1)), settings)
        counts += np.bincount(np.asarray(tokens), minlength=20)
    weights = np.exp(logits[0].astype(np.float64))
    expected = num_draws * weights / weights.sum()
    # 19 degrees of freedom: above 43.8 once in a thousand times.
    assert ((counts - expected) ** 2 / expected).sum() < 43.8


@pytest.mark.parametrize("num_edited", [1, 6, 10])
@pytest.mark.parametrize("name", EDITS)
def test_edits_are_the_cores(name, num_edited):
    edited = SamplingParams(temperature=0, **EDITS[name])
    params = [edited] * num_edited + [SamplingParams(temperature=0)]
    rows = SampledRows(params, VOCABULARY, seed=3, stop_token_ids=(9, 300))
    # Several outputs, which repeat, so that counts and limits matter.
    for step in range(12):
        found, truth = rows.both(logits_of(step // 2, len(params)))
        assert found.tolist() == truth.tolist()


def test_bad_words_are_the_cores():
    params = [SamplingParams(temperature=0, bad_words=("x",))] * 3 + [SamplingParams(temperature=0)]
    logits = logits_of(1, len(params))
    first, second, third = np.argsort(-logits[0])[:3].tolist()
    words = ((first,), (second, third), (second, second, second), (third, second))
    rows = SampledRows(params, VOCABULARY, seed=3, words=words)
    logits[:] = logits[0]
    seen = []
    for _ in range(6):
        found, truth = rows.both(logits)
        assert found.tolist() == truth.tolist()
        seen.append(int(found[0]))
    assert len(set(seen)) > 1
    assert int(found[3]) == first


def test_masks_forbid_what_they_leave_out():
    from cardan.core.interfaces.executor import TokenMask

    params = [SamplingParams(temperature=0)] * 4
    logits = logits_of(1, 4)
    rows = SampledRows(params, VOCABULARY, seed=3)
    bits = np.zeros((2, -(-VOCABULARY // 32)), np.int32)
    bits[0, 31] = 0b1011  # tokens 992, 993 and 995
    bits[1, 0] = -(2**31)  # token 31
    numbers = rows.numbers
    mask = TokenMask([int(numbers[2]), int(numbers[0])], bits)
    found, truth = rows.both(logits, mask)
    assert found.tolist() == truth.tolist()
    assert int(found[2]) in (992, 993, 995)
    assert int(found[0]) == 31


def test_log_probabilities():
    logits = np.round(logits_of(2, 5), 1)
    tokens = np.asarray([3, 1002, 0, 77, int(logits[4].argmax())], np.int32)
    table = logprobs_table(jnp.asarray(logits), jnp.asarray(tokens), 12)
    truth = torch.from_numpy(logits).double().log_softmax(-1).numpy()
    ids = np.asarray(table.token_ids)
    assert ids[:, 0].tolist() == tokens.tolist()
    places = np.arange(5)[:, None]
    np.testing.assert_allclose(np.asarray(table.logprobs), truth[places, ids], atol=2e-5)
    # Of equal ones the lower id is first.
    expected = np.argsort(-logits, axis=-1, kind="stable")[:, :12]
    assert ids[:, 1:].tolist() == expected.tolist()
    ranks = (logits > logits[np.arange(5), tokens][:, None]).sum(-1) + 1
    assert np.asarray(table.ranks).tolist() == ranks.tolist()
