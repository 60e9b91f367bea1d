"""The sampler: each setting alone, in pairs, in any batch, over time; against the oracle."""

import itertools

import numpy as np
import pytest
import torch
from sampling_helpers import (
    make,
    new_row,
    oracle_logits,
    oracle_probabilities,
    oracle_token,
    random_logits,
    sample,
)

from cardan.core.interfaces.executor import TokenMask
from cardan.core.interfaces.random_stream import random_streams, uniforms
from cardan.core.sampling.sampler import BAD_LOGITS, NO_TOKEN_LEFT
from cardan.core.types.sampling_params import SamplingParams

V = 40
PROMPT, OUTPUT = [3, 5, 5, 8, 39], [7, 5, 1, 7]
# Each entry: sampling parameters, and what comes with the row beside them.
SETTINGS = {
    "plain": ({}, {}),
    "greedy": ({"temperature": 0.0}, {}),
    "hot": ({"temperature": 1.7}, {}),
    "cold": ({"temperature": 0.3}, {}),
    "top_k": ({"top_k": 5}, {}),
    "top_p": ({"top_p": 0.7}, {}),
    "min_p": ({"min_p": 0.1}, {}),
    "repetition": ({"repetition_penalty": 1.8}, {}),
    "presence": ({"presence_penalty": 1.5}, {}),
    "frequency": ({"frequency_penalty": -1.2}, {}),
    "bias": ({"logit_bias": {2: 4.0, 9: -100.0, 7: 1.0}}, {}),
    "allowed": ({"allowed_token_ids": (1, 2, 5, 7, 11, 20, 21)}, {}),
    "min_tokens": ({"min_tokens": 10}, {"stops": (1, 2, 20, 999)}),
    "min_tokens_over": ({"min_tokens": 4}, {"stops": (1, 2, 20)}),
    "bad_words": ({}, {"bad_words": ((11,), (7, 2), (5, 2), (1, 7, 21), (1, 6, 20), (2, 2))}),
    "logprobs": ({"logprobs": 3}, {}),
}


def settings_row(names, row=0, seed=0, output=OUTPUT):
    params, extra = {}, {}
    for name in names:
        params.update(SETTINGS[name][0])
        extra.update(SETTINGS[name][1])
    tokens = PROMPT + list(output)
    return new_row(row, SamplingParams(**params), tokens, len(PROMPT), seed, **extra)


def expect(row, logits, num_outputs, bits=None):
    edited = oracle_logits(logits, row, bits)
    u = uniforms(random_streams(np.array([row.seed])), np.array([num_outputs]))[0]
    return oracle_token(edited, row.params, u)


@pytest.mark.parametrize("ties", [False, True])
def test_every_setting_and_every_pair_equals_the_oracle(ties):
    names = [(a,) for a in SETTINGS] + list(itertools.combinations(SETTINGS, 2))
    rows = [settings_row(pair, row=i, seed=i * 7) for i, pair in enumerate(names)]
    kit = make(V, rows, max_num_rows=len(rows))
    for trial in range(5):
        logits = random_logits(len(rows), trial, ties=ties)
        result = sample(kit, logits, range(len(rows)), len(OUTPUT))
        assert not result.failed.any()
        tokens = result.token_ids.tolist()
        checked = 0
        for i, row in enumerate(rows):
            token, margin = expect(row, logits[i], len(OUTPUT))
            if row.params.is_greedy or margin > 1e-6:
                assert tokens[i] == token, (names[i], trial)
                checked += 1
        assert checked >= len(rows) - 2
        # Histories must not drift between trials: start from the same rows again.
        kit.states.remove(range(len(rows)))
        for row in rows:
            kit.states.add(row)
    kit.states.remove(range(len(rows)))
    assert kit.states.num_rows == 0
    assert kit.states.num_bytes == 0


def test_a_row_gives_the_same_token_alone_and_in_any_batch():
    names = [*((a,) for a in SETTINGS), ("top_p", "hot", "presence"), ("top_k", "bad_words")]
    rows = [settings_row(pair, row=i, seed=100 + i) for i, pair in enumerate(names)]
    logits = random_logits(len(rows), 1, ties=True)
    alone = []
    for i, row in enumerate(rows):
        result = sample(make(V, [row]), logits[i : i + 1], [row.row], len(OUTPUT))
        alone += result.token_ids.tolist()
    rng = np.random.default_rng(0)
    for size in (len(rows), 2, 3, 7, 11):
        picked = rng.permutation(len(rows))[:size]
        kit = make(V, [rows[i] for i in picked])
        result = sample(kit, logits[picked], picked, len(OUTPUT))
        assert result.token_ids.tolist() == [alone[i] for i in picked]


def test_huge_vocabulary_mixed_batch_equals_rows_alone():
    vocab = 49152
    settings = [{}, {"temperature": 0}, {"top_p": 0.9}, {"top_k": 50, "temperature": 0.7}]
    settings += [{"min_p": 0.05}, {"top_p": 0.95, "top_k": 2000}, {"frequency_penalty": 1.0}]
    rows = [new_row(i, SamplingParams(**s), [1, 2], 1, seed=i) for i, s in enumerate(settings)]
    logits = random_logits(len(rows), 2, vocab) * 2
    together = sample(make(vocab, rows), logits, range(len(rows)), 1).token_ids.tolist()
    for i, row in enumerate(rows):
        alone = sample(make(vocab, [row]), logits[i : i + 1], [i], 1)
        assert alone.token_ids.tolist() == [together[i]]
    for i in (2, 5, 6):  # the oracle is slow
        token, margin = expect(rows[i], logits[i], 1)
        assert together[i] == token or margin < 1e-6


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 9e-6},
        {"top_k": 1, "temperature": 2.0},
        {"top_p": 1e-3, "temperature": 1.0},
        {"top_p": 1e-9, "temperature": 2.0},
        {"top_k": 1, "top_p": 0.5, "min_p": 0.5},
    ],
)
def test_all_spellings_of_greedy_agree(params):
    for ties in (False, True):
        logits = random_logits(16, 3, ties=ties)
        rows = [new_row(i, SamplingParams(**params), [1], seed=i) for i in range(16)]
        result = sample(make(V, rows), logits, range(16))
        assert result.token_ids.tolist() == np.argmax(logits, -1).tolist()


def test_low_temperature_of_large_logits_does_not_overflow():
    logits = np.array([[3e38, -3e38, 1.0], [1e4, 1e4 - 1, 0.0]], np.float32)
    rows = [new_row(i, SamplingParams(temperature=2e-5), [1]) for i in range(2)]
    result = sample(make(3, rows), logits, [0, 1])
    assert result.token_ids.tolist() == [0, 0]
    assert result.failed.tolist() == [False, False]


@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 0.6, "top_p": 0.97}, {"top_k": 6}, {"min_p": 0.08, "temperature": 1.3}],
)
def test_frequencies_follow_the_distribution(params):
    vocab, draws, batch = 16, 20_000, 50
    params = SamplingParams(**params)
    logits = random_logits(1, 9, vocab) * 0.7
    truth = oracle_probabilities(logits[0].astype(np.float64), params)
    rows = [new_row(i, params, [1], seed=1000 + i) for i in range(batch)]
    kit = make(vocab, rows)
    counts = np.zeros(vocab)
    for position in range(draws // batch):
        result = sample(kit, logits.repeat(batch, 0), range(batch), position)
        counts += np.bincount(result.token_ids.numpy(), minlength=vocab)
    assert counts[truth == 0].sum() == 0
    expected = truth[truth > 0] * draws
    chi = ((counts[truth > 0] - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    assert freedom >= 3
    assert chi < freedom + 4 * np.sqrt(2 * freedom)


def generate(kit, row, steps, start, logits):
    """Run one row; returns its tokens."""
    tokens = []
    for step in range(start, start + steps):
        result = sample(kit, logits[step][None], [row], step)
        tokens += result.token_ids.tolist()
    return tokens


def test_seeds_reproduce_and_differ():
    logits = random_logits(30, 4)
    tokens = {}
    for seed in (1, 1, 2, -5):
        kit = make(V, [new_row(0, SamplingParams(), [1], seed=seed)])
        run = generate(kit, 0, 30, 0, logits)
        assert tokens.setdefault(seed, run) == run
    assert len({tuple(run) for run in tokens.values()}) == 3


def test_preemption_changes_nothing():
    names = ("hot", "repetition", "presence", "bad_words", "min_tokens")
    logits = random_logits(30, 5, vocab_size=V)
    whole = settings_row(names, seed=3, output=[])
    tokens = generate(make(V, [whole]), 0, 30, 0, logits)
    assert len(set(tokens)) > 5
    for cut in (1, 2, 9, 10, 11, 29):
        kit = make(V, [settings_row(names, row=4, seed=3, output=[])])
        first = generate(kit, 4, cut, 0, logits)
        kit.states.remove([4])
        assert kit.states.num_bytes == 0
        kit.states.add(settings_row(names, row=9, seed=3, output=first))
        assert first + generate(kit, 9, 30 - cut, cut, logits) == tokens


def test_histories_follow_the_samples_step_by_step():
    names = ("repetition", "presence", "frequency", "bad_words", "min_tokens", "top_p")
    kit = make(V, [settings_row(names, seed=8, output=[]), new_row(1, SamplingParams(), [1])])
    output = []
    for step in range(40):
        logits = random_logits(2, 50 + step)
        if step % 3 == 1:  # the batch changes and comes back
            got = sample(kit, logits[:1], [0], step)
        else:
            got = sample(kit, logits[::-1], [1, 0], step)
        now = settings_row(names, seed=8, output=output)
        token, margin = expect(now, logits[0], step)
        assert int(got.token_ids[-1]) == token or margin < 1e-6
        output.append(int(got.token_ids[-1]))


def test_bad_words_of_many_rows_and_lengths():
    long_word, short = tuple(range(1, 9)), ((5,), (4, 6))
    params = SamplingParams(temperature=0)
    kit = make(V, [new_row(0, params, [1, 4], 1, bad_words=short)])
    kit.states.add(new_row(1, params, [9, *range(1, 8)], 1, bad_words=(long_word,)))
    logits = np.zeros((2, V), np.float32)
    logits[0, [5, 6]] = 3, 2
    logits[1, 8] = 3
    # Row 0 ends with 4: both 5 and 6 are out. Row 1 has all of its word but the last token.
    assert sample(kit, logits, [0, 1], [1, 7]).token_ids.tolist() == [0, 0]
    # Now the outputs end otherwise: only the single-token word is still forbidden.
    assert sample(kit, logits, [0, 1], [2, 8]).token_ids.tolist() == [6, 8]
    # The prompt does not count.
    kit.states.add(new_row(2, params, [4], bad_words=short))
    assert sample(kit, logits[:1], [2], 0).token_ids.tolist() == [6]
    kit.states.remove([0, 1])
    assert kit.states.num_bytes > 0
    kit.states.remove([2])
    assert kit.states.num_bytes == 0


def test_nan_and_empty_rows_fail_alone():
    logits = random_logits(5, 6)
    clean = logits.copy()
    logits[0, 3], logits[1], logits[2, 0] = np.nan, -np.inf, np.inf
    for settings in ({"temperature": 0}, {"top_p": 0.8}, {"presence_penalty": 1.0, "min_p": 0.1}):
        rows = [new_row(i, SamplingParams(**settings), [1], seed=i) for i in range(5)]
        good = sample(make(V, rows), clean, range(5))
        result = sample(make(V, rows), logits, range(5))
        assert result.failed.tolist() == [True, True, True, False, False]
        assert result.token_ids.tolist() == [0, 0, 0, *good.token_ids.tolist()[3:]]
        assert result.failure_reasons() == dict.fromkeys(range(3), BAD_LOGITS)


def test_nan_is_found_behind_masks():
    logits = random_logits(1, 6)
    logits[0, 3] = np.nan
    kit = make(V, [new_row(0, SamplingParams(allowed_token_ids=(1, 2)), [1])])
    assert sample(kit, logits, [0]).failure_reasons() == {0: BAD_LOGITS}


def test_no_token_left_fails_only_its_row():
    params = SamplingParams(allowed_token_ids=(1, 2), min_tokens=2)
    for extra in ({}, {"temperature": 0.0}):
        rows = [
            new_row(0, params.replace(**extra), [5], stops=(2,), bad_words=((1,),)),
            new_row(1, SamplingParams(), [5], seed=4),
        ]
        logits = random_logits(2, 6)
        result = sample(make(V, rows), logits, [0, 1])
        assert result.failed.tolist() == [True, False]
        assert result.token_ids[0] == 0
        assert result.failure_reasons() == {0: NO_TOKEN_LEFT}
        alone = sample(make(V, rows[1:]), logits[1:], [1])
        assert alone.token_ids[0] == result.token_ids[1]


def bits_of(*sets, vocab_size=V):
    bits = np.zeros((len(sets), -(-vocab_size // 32)), np.int64)
    for row, tokens in zip(bits, sets, strict=True):
        for t in tokens:
            row[t // 32] |= 1 << (t % 32)
    return bits.astype(np.uint32).view(np.int32)


def test_token_mask_joins_the_other_settings():
    rows = [settings_row(("bias", "presence"), row=i, seed=i) for i in range(4)]
    logits = random_logits(4, 8)
    bits = bits_of({31, 32, 5}, {0}, set())
    bits.flags.writeable = False
    result = sample(make(V, rows), logits, [0, 1, 2, 3], 4, TokenMask((2, 0, 3), bits))
    for i, row_bits in ((0, bits[1]), (1, None), (2, bits[0])):
        token, margin = expect(rows[i], logits[i], 4, row_bits)
        assert int(result.token_ids[i]) == token or margin < 1e-6
    assert result.failed.tolist() == [False, False, False, True]
    assert result.failure_reasons() == {3: NO_TOKEN_LEFT}


def test_token_mask_errors():
    kit = make(V, [new_row(0, SamplingParams(), [1]), new_row(1, SamplingParams(), [1])])
    logits = random_logits(1, 0)
    with pytest.raises(ValueError, match=r"mask rows \[1\] are not in this batch"):
        sample(kit, logits, [0], mask=TokenMask((1,), bits_of({1})))
    with pytest.raises(ValueError, match=r"mask bits must be \[1, 2\], got \[1, 1\]"):
        sample(kit, logits, [0], mask=TokenMask((0,), np.zeros((1, 1), np.int32)))


def test_unused_features_are_not_called():
    rows = [new_row(i, SamplingParams(temperature=0), [1]) for i in range(3)]
    kit = make(V, rows)
    sample(kit, random_logits(3, 0), range(3))
    assert kit.ops.calls == ["greedy_tokens"]
    kit.ops.calls.clear()
    kit.states.add(new_row(3, SamplingParams(), [1]))
    sample(kit, random_logits(4, 0), range(4))
    assert kit.ops.calls == ["greedy_tokens", "sample_tokens"]
    assert kit.states.num_bytes == 0
    kit.ops.calls.clear()
    kit.states.add(new_row(4, SamplingParams(top_k=3, presence_penalty=1, logprobs=1), [1]))
    sample(kit, random_logits(3, 0), range(3))
    assert kit.ops.calls == ["greedy_tokens"]
    kit.ops.calls.clear()
    sample(kit, random_logits(2, 0), [0, 4])
    assert kit.ops.calls == [
        "apply_penalties",
        "greedy_tokens",
        "apply_min_p_top_k_top_p",
        "sample_tokens",
        "token_logprobs",
    ]


def test_empty_batch_and_shape_errors():
    kit = make(V, [new_row(0, SamplingParams(), [1])])
    result = sample(kit, np.empty((0, V)), [])
    assert result.token_ids.shape == result.failed.shape == (0,)
    assert result.logprobs == {}
    with pytest.raises(ValueError, match=r"logits must be float32 \(1, 40\)"):
        sample(kit, np.zeros((1, V + 1)), [0])
    with pytest.raises(ValueError, match=r"got torch\.float64"):
        kit.sampler.sample(torch.zeros(1, V, dtype=torch.float64), [0], np.zeros(1, np.int64))
    with pytest.raises(ValueError, match="num_output_tokens has 2 entries for 1 rows"):
        kit.sampler.sample(torch.zeros(1, V), [0], np.zeros(2, np.int64))


def test_float32_devices_sample_nearly_the_same():
    logits = random_logits(32, 15)
    rows = [new_row(i, SamplingParams(top_p=0.8, temperature=0.9), [1], seed=i) for i in range(32)]
    wide = sample(make(V, rows), logits, range(32)).token_ids
    narrow = sample(make(V, rows, wide_dtype=torch.float32), logits, range(32)).token_ids
    assert torch.equal(wide, narrow)


@pytest.mark.parametrize("inside", ["add", "sample", "both"])
def test_inference_mode_may_be_on_or_off(inside):
    names = ("presence", "bad_words", "min_tokens", "bias", "allowed", "top_p")
    kit, tokens = make(V), []
    for row in range(6):
        with torch.inference_mode(inside != "sample" and row % 2 == 0):
            kit.states.add(settings_row(names, row=row, seed=row))
        with torch.inference_mode(inside != "add" and row % 3 == 0):
            result = sample(kit, random_logits(row + 1, row), range(row + 1), 4)
        tokens.append(result.token_ids.tolist())
    kit, again = make(V), []
    for row in range(6):
        kit.states.add(settings_row(names, row=row, seed=row))
        result = sample(kit, random_logits(row + 1, row), range(row + 1), 4)
        again.append(result.token_ids.tolist())
    assert tokens == again
