"""Rows that enter and leave, checks of their settings, and plugins' logits processors."""

import logging

import numpy as np
import pytest
from sampling_helpers import make, new_row, sample

from cardan.core.interfaces.logits import LogitsProcessor
from cardan.core.sampling.sampler import NO_TOKEN_LEFT
from cardan.core.sampling.validation import check_token_ids
from cardan.core.types.errors import InputError
from cardan.core.types.sampling_params import SamplingParams

V = 40
GREEDY = SamplingParams(temperature=0)


class Recorder(LogitsProcessor):
    """Makes a token the likeliest for rows that name it, and writes down all it is told."""

    name = "recorder"
    contract = (1, 0)

    def __init__(self, key="want", fail_in=None):
        self.key, self.fail_in = key, fail_in
        self.rows, self.told = {}, []

    def validate(self, params):
        return None

    def wants(self, params):
        return self.key in params.extra_args

    def update(self, added, removed):
        if self.fail_in == "update" and added:
            raise RuntimeError("no update")
        for row in removed:
            del self.rows[row]
        for new in added:
            self.rows[new.row] = new

    def apply(self, logits, rows, new_tokens):
        if self.fail_in == "apply":
            logits.fill_(float("nan"))
            raise RuntimeError("no apply")
        if self.fail_in == "shape":
            return logits[:, :1]
        assert set(rows) <= set(self.rows)
        self.told.append((dict(rows), dict(new_tokens)))
        for row, place in rows.items():
            logits[place, self.rows[row].params.extra_args[self.key]] += 50
        return logits


def wanting(row, token, tokens=(1,), num_prompt=1, **settings):
    params = SamplingParams(temperature=0, extra_args={"want": token}, **settings)
    return new_row(row, params, tokens, num_prompt)


def test_processors_see_their_rows_and_each_token_once():
    processor = Recorder()
    kit = make(V, [wanting(3, 7, [1, 2, 9], 2), wanting(5, 8)], processors=[processor])
    kit.states.add(new_row(4, GREEDY, [1]))
    assert processor.rows[3].prompt_token_ids == (1, 2)
    assert list(processor.rows[3].output_token_ids) == [9]
    logits = np.zeros((3, V), np.float32)
    assert sample(kit, logits, [3, 4, 5]).token_ids.tolist() == [7, 0, 8]
    assert sample(kit, logits[:1], [5]).token_ids.tolist() == [8]
    assert sample(kit, logits, [5, 3, 4]).token_ids.tolist() == [8, 7, 0]
    assert [new for _, new in processor.told] == [{}, {5: 8}, {5: 8, 3: 7}]
    assert list(processor.rows[3].output_token_ids) == [9, 7]
    assert list(processor.rows[5].output_token_ids) == [8, 8]
    assert sample(kit, logits[:1], [4]).token_ids.tolist() == [0]
    assert len(processor.told) == 3
    kit.states.remove([3, 5])
    assert processor.rows == {}
    kit.states.add(wanting(3, 2))  # the same row for another sequence: no old token
    sample(kit, logits[:1], [3])
    assert processor.told[-1] == ({3: 0}, {})


@pytest.mark.parametrize(
    ("fail_in", "text"),
    [
        ("apply", "logits processor recorder failed: RuntimeError: no apply"),
        ("update", "logits processor recorder failed: RuntimeError: no update"),
        ("shape", "logits processor recorder failed: ValueError: apply returned"),
    ],
)
def test_a_faulty_processor_fails_only_its_rows_and_is_logged_once(fail_in, text, caplog):
    faulty, good = Recorder("other", fail_in), Recorder()
    kit = make(V, [wanting(0, 7), new_row(1, GREEDY, [1])], processors=[faulty, good])
    params = SamplingParams(temperature=0, extra_args={"other": 1})
    kit.states.add(new_row(2, params, [1]))
    logits = np.zeros((3, V), np.float32)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            result = sample(kit, logits, [0, 1, 2])
            assert result.failed.tolist() == [False, False, True]
            assert result.token_ids.tolist() == [7, 0, 0]
            assert result.failure_reasons()[2].startswith(text)
        if fail_in != "update":  # the whole batch is its own
            assert sample(kit, logits[:1], [2]).failed.tolist() == [True]
        kit.states.remove([2])
    assert len([r for r in caplog.records if "recorder" in r.getMessage()]) == 1
    assert sample(kit, logits[:2], [0, 1]).failed.tolist() == [False, False]


def test_a_processor_that_forbids_everything_fails_its_row():
    class Never(Recorder):
        def apply(self, logits, rows, new_tokens):
            return logits - float("inf")

    kit = make(V, [wanting(0, 7)], processors=[Never()])
    result = sample(kit, np.zeros((1, V)), [0])
    assert result.failure_reasons() == {0: NO_TOKEN_LEFT}


def test_rows_enter_and_leave():
    kit = make(V, [new_row(0, GREEDY, [1])], max_num_rows=2)
    with pytest.raises(ValueError, match="row 0 is occupied; remove it first"):
        kit.states.add(new_row(0, GREEDY, [1]))
    with pytest.raises(ValueError, match="row 2 is not among the 2 rows"):
        kit.states.add(new_row(2, GREEDY, [1]))
    with pytest.raises(ValueError, match="row 1 is not occupied"):
        kit.states.remove([1])
    with pytest.raises(ValueError, match=r"rows \[1\] are not occupied"):
        kit.states.plan([0, 1])
    with pytest.raises(ValueError, match=r"a row occurs twice among \[0, 0\]"):
        kit.states.plan([0, 0])
    with pytest.raises(ValueError, match="rows must be among the 2 rows"):
        kit.states.plan([5])
    kit.states.remove([0])
    assert kit.states.num_rows == 0


def test_a_row_starts_clean_after_another_sequence():
    settings = {"presence_penalty": 2.0, "logit_bias": {5: 9.0}, "allowed_token_ids": (5, 6)}
    old = new_row(0, GREEDY.replace(min_tokens=3, logprobs=2, **settings), [1, 6], 1, stops=(6,))
    old.bad_words_token_ids = ((6, 5), (6,))
    kit = make(V, [old])
    assert kit.states.num_bytes > 0
    kit.states.remove([0])
    kit.states.add(new_row(0, GREEDY, [1]))
    plan = kit.states.plan([0])
    assert (plan.edits, plan.processors, plan.draw, plan.logprobs) == ((), None, None, ())


def test_the_plan_is_reused_until_something_changes():
    kit = make(V, [new_row(i, SamplingParams(), [1]) for i in range(3)])
    plan = kit.states.plan([0, 1])
    assert kit.states.plan(np.array([0, 1], np.int32)) is plan
    assert kit.states.plan([1, 0]) is not plan
    plan = kit.states.plan([0, 1])
    kit.states.remove([2])
    assert kit.states.plan([0, 1]) is not plan


def test_penalty_tables_grow_and_go():
    params = SamplingParams(temperature=0, frequency_penalty=1.0)
    kit = make(V, max_num_rows=11)
    logits = np.zeros((11, V), np.float32)
    for row in range(11):
        # Row i has output token 0 i times, so its logit is -i.
        kit.states.add(new_row(row, params, [1] + [0] * row, 1))
    assert kit.states.num_bytes == 11 * V * 5
    logits[:, 0] = 5.5
    tokens = sample(kit, logits, range(11)).token_ids.tolist()
    assert tokens == [0] * 6 + [1] * 5
    kit.states.remove(range(10))
    assert sample(kit, logits[10:], [10]).token_ids.tolist() == [2]
    kit.states.remove([10])
    assert kit.states.num_bytes == 0


def test_prompt_tokens_outside_the_vocabulary_are_skipped_by_penalties():
    params = SamplingParams(temperature=0, repetition_penalty=2.0)
    kit = make(V, [new_row(0, params, [1, 5000, -1])])
    logits = np.zeros((1, V), np.float32)
    logits[0, [1, 2]] = 3.0, 2.0
    assert sample(kit, logits, [0]).token_ids.tolist() == [2]


@pytest.mark.parametrize(
    ("params", "words", "field", "text"),
    [
        ({"logit_bias": {V: 1.0}}, (), "logit_bias", "token id 40, but the vocabulary has ids"),
        ({"allowed_token_ids": (1, 99)}, (), "allowed_token_ids", "token id 99"),
        ({"stop_token_ids": (41,)}, (), "stop_token_ids", "ids 0 to 39"),
        ({}, ((1, 77),), "bad_words", "token id 77"),
        ({}, ((),), "bad_words", "a word has no tokens; remove it"),
        ({"logprobs": 41}, (), "logprobs", "logprobs is 41 but the vocabulary has 40 tokens"),
        ({"prompt_logprobs": 41}, (), "prompt_logprobs", "use -1 for all of them"),
    ],
)
def test_ids_outside_the_vocabulary(params, words, field, text):
    params = SamplingParams(**params)
    with pytest.raises(InputError, match=text) as caught:
        check_token_ids(params, V, words)
    assert caught.value.field == field
    kit = make(V)
    with pytest.raises(InputError, match=text):
        kit.states.add(new_row(0, params, [1], bad_words=words))
    assert kit.states.num_rows == 0


def test_settings_at_the_edge_of_the_vocabulary_are_fine():
    params = SamplingParams(
        logit_bias={V - 1: 1.0}, allowed_token_ids=(0, V - 1), logprobs=V, prompt_logprobs=-1
    )
    check_token_ids(params, V, ((V - 1,),))
