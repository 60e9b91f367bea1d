"""What programs for TPUs get of a step, against loops over tokens. Needs no jax."""

from dataclasses import replace

import numpy as np
import pytest

from cardan.core.interfaces.executor import TokenMask
from cardan.core.types.sampling_params import SamplingParams
from cardan.core.types.step import BlockCopies, BlockEdits, NewRow, SchedulerOutput
from cardan.platforms.tpu.buckets import StepBuckets, step_policy
from cardan.platforms.tpu.rows import Rows
from cardan.platforms.tpu.step_fields import StepFields
from cardan.platforms.tpu.step_layout import FLOATS, StepLayout

BLOCK = 8
NUM_ROWS = 12
MAX_LEN = 400
VOCABULARY = 97
EMPTY = np.zeros(0, np.int32)


class Batch:
    """A step of random rows: ``counts`` tokens each, behind random numbers of computed ones."""

    def __init__(self, counts, seed, params=None):
        rng = np.random.default_rng(seed)
        self.counts = np.asarray(counts, np.int32)
        size = len(counts)
        self.numbers = rng.permutation(NUM_ROWS)[:size].astype(np.int32)
        self.computed = rng.integers(0, MAX_LEN - self.counts.max(), size).astype(np.int32)
        self.samples = np.ones(size, np.bool_) if params else rng.random(size) < 0.7
        sizes = -(-(self.computed + self.counts) // BLOCK)
        blocks = 1 + rng.permutation(int(sizes.sum()))
        self.blocks = np.split(blocks.astype(np.int32), np.cumsum(sizes)[:-1])
        self.rows = Rows(NUM_ROWS, MAX_LEN // BLOCK, VOCABULARY)
        given = params or [SamplingParams(temperature=0)] * size
        self.step = SchedulerOutput(
            step_id=0,
            new_rows=[self._row(i, item) for i, item in enumerate(given)],
            freed_rows=[],
            block_edits=(BlockEdits(EMPTY, EMPTY, EMPTY),),
            block_copies=(BlockCopies(EMPTY, EMPTY),),
            rows=self.numbers,
            keys=self.numbers.astype(np.int64),
            num_scheduled_tokens=self.counts,
            num_computed_tokens=self.computed,
            samples=self.samples,
        )
        self.rows.apply(self.step)
        self.fields = StepFields(self.step, self.rows)
        buckets = StepBuckets(step_policy(MAX_LEN), NUM_ROWS, 256, BLOCK)
        shape = buckets.shape(
            self.fields.num_tokens, size, self.fields.longest, self.fields.has_prompts
        )
        self.layout = StepLayout(self.fields.flavoured(shape), BLOCK)

    def _row(self, index, params):
        known = int(self.computed[index] + self.counts[index])
        return NewRow(
            row=int(self.numbers[index]),
            key=index,
            token_ids=np.arange(known, dtype=np.int32),
            num_prompt_tokens=max(known - 5, 1),
            num_computed_tokens=int(self.computed[index]),
            params=params,
            seed=index,
            stop_token_ids=(3,),
            bad_words_token_ids=((1, 2), (7,)) if params.bad_words else (),
            block_ids=(self.blocks[index],),
        )

    def arrays(self):
        return self.fields.fields(self.layout)

    def tokens(self):
        """Row index and position of each token, in order."""
        for i, (count, computed) in enumerate(zip(self.counts, self.computed, strict=True)):
            yield from ((i, int(computed + j)) for j in range(count))


COUNTS = [[1] * 5, [1], [3], [1, 1, 200, 1], [40, 1, 2, 17, 1], [130, 100], [256], [2] * 12]


@pytest.fixture(params=range(len(COUNTS)), ids=[str(counts) for counts in COUNTS])
def batch(request):
    return Batch(COUNTS[request.param], seed=request.param)


def test_tokens_have_their_rows_positions_and_slots(batch):
    arrays = batch.arrays()
    expected = list(batch.tokens())
    for token, (row, position) in enumerate(expected):
        assert arrays["token_rows"][token] == batch.numbers[row]
        assert arrays["positions"][token] == position
        block = batch.blocks[row][position // BLOCK]
        assert arrays["slots"][token] == block * BLOCK + position % BLOCK
    # Padding belongs to the row of nobody, and is written nowhere.
    assert (arrays["token_rows"][len(expected) :] == NUM_ROWS).all()
    assert (arrays["slots"][len(expected) :] == -1).all()


def test_pieces_cover_each_query_once(batch):
    arrays, layout = batch.arrays(), batch.layout
    covered = []
    for token, (row, position, length) in zip(
        arrays["single_tokens"], arrays["single_pieces"], strict=True
    ):
        if length:
            covered.append((int(token), (int(row), int(position))))
    for token, (row, position, length) in zip(
        arrays["piece_tokens"], arrays["pieces"], strict=True
    ):
        assert length <= layout.shape.piece_tokens
        covered += [(int(token + j), (int(row), int(position + j))) for j in range(length)]
    assert sorted(covered) == list(enumerate(batch.tokens()))


def test_targets_name_each_written_block_once(batch):
    arrays = batch.arrays()
    written, blocks = [], []
    for (block, first, count), token in zip(
        arrays["targets"], arrays["target_tokens"], strict=True
    ):
        if not count:
            assert block == 0
            continue
        blocks.append(int(block))
        written += [(int(token + j), int(block * BLOCK + first + j)) for j in range(count)]
    slots = arrays["slots"][arrays["slots"] >= 0]
    assert sorted(written) == list(enumerate(slots.tolist()))
    assert len(set(blocks)) == len(blocks)


def test_rows_end_where_they_end(batch):
    arrays = batch.arrays()
    size = len(batch.counts)
    ends = np.cumsum(batch.counts) - 1
    assert arrays["ends"][:size].tolist() == ends.tolist()
    assert arrays["lengths"][:size].tolist() == (batch.computed + batch.counts).tolist()
    assert arrays["samples"].tolist() == [*batch.samples.astype(int).tolist()] + [0] * (
        batch.layout.shape.rows - size
    )
    for i, table in enumerate(arrays["tables"][:size]):
        blocks = batch.blocks[i]
        assert table[: len(blocks)].tolist() == blocks.tolist()


def test_what_is_packed_comes_out(batch):
    arrays, layout = batch.arrays(), batch.layout
    words = layout.packed(arrays)
    offset = 0
    for name, shape in layout.fields.items():
        size = int(np.prod(shape))
        found = words[offset : offset + size].reshape(shape)
        found = found.view(np.float32) if name in FLOATS else found
        np.testing.assert_array_equal(found, arrays[name])
        offset += size
    assert offset == layout.size


def test_settings_make_a_flavour():
    plain = Batch([1, 1, 1], seed=1)
    assert not plain.layout.shape.edited
    assert plain.layout.shape.num_logprobs is None
    greedy = SamplingParams(temperature=0)
    batch = Batch([1, 1, 1], 1, [greedy, greedy.replace(logprobs=3, bad_words=("x",)), greedy])
    shape = batch.layout.shape
    assert (shape.edited, shape.num_logprobs, shape.words) == (True, 8, (8, 8))
    assert (shape.num_prompt_logprobs, shape.num_biased) == (None, 0)
    arrays = batch.arrays()
    assert arrays["words"][:2, -2:].tolist() == [[1, 2], [-1, 7]]
    assert (arrays["words"][:, :-2] == -1).all()
    # Padding belongs to no row.
    assert arrays["word_rows"].tolist() == [1, 1] + 6 * [shape.rows]
    assert arrays["penalties"][0].tolist() == [1.0] * shape.rows
    assert replace(shape, edited=False, num_logprobs=None, words=(0, 0)) == plain.layout.shape


def test_rows_that_do_not_sample_ask_for_nothing():
    greedy = SamplingParams(temperature=0)
    batch = Batch([3, 2], 1, [greedy, greedy.replace(logprobs=3, presence_penalty=1.0)])
    fields = StepFields(replace(batch.step, samples=np.asarray([True, False])), batch.rows)
    shape = fields.flavoured(batch.layout.shape)
    assert (shape.edited, shape.num_logprobs) == (False, None)


@pytest.mark.parametrize(("outputs", "is_edited"), [(0, True), (4, True), (5, False)])
def test_stops_forbidden_at_first_are_edits_no_more_later(outputs, is_edited):
    batch = Batch([1], 1, [SamplingParams(temperature=0, min_tokens=5)])
    batch.rows.num_prompt_tokens[:] = batch.computed[0] + 1 - outputs
    shape = StepFields(batch.step, batch.rows).flavoured(batch.layout.shape)
    assert (shape.edited, shape.num_biased) == (is_edited, 8 * is_edited)


def test_prompts_have_tables_up_to_the_token_before_their_last():
    greedy = SamplingParams(temperature=0, logprobs=1)
    params = [greedy.replace(prompt_logprobs=k) for k in (None, 0, 3, -1)]
    batch = Batch([4, 6, 2, 7], 1, params)
    # Prompts end within the step, behind it, before it, and with its last token.
    ends = batch.computed + np.asarray([2, 9, 1, 7])
    batch.rows.num_prompt_tokens[batch.numbers] = ends
    fields = StepFields(batch.step, batch.rows)
    found = [(table.row, table.start, table.count, table.size) for table in fields.prompt_tables()]
    numbers = batch.numbers.tolist()
    assert found == [(numbers[1], 4, 6, 0), (numbers[3], 12, 6, VOCABULARY)]
    assert fields.flavoured(batch.layout.shape).num_prompt_logprobs == VOCABULARY


def test_masks_are_of_rows_that_sample():
    batch = Batch([1, 3], 1, [SamplingParams(temperature=0)] * 2)
    step = replace(batch.step, samples=np.asarray([True, False]))
    bits = np.zeros((1, 4), np.int32)
    with pytest.raises(ValueError, match="not among those that sample"):
        StepFields(step, batch.rows, TokenMask([int(batch.numbers[1])], bits))
    with pytest.raises(ValueError, match=r"must be \[1, 4\], got \[1, 3\]"):
        StepFields(step, batch.rows, TokenMask([int(batch.numbers[0])], bits[:, :3]))


def test_freed_rows_leave_nothing():
    params = [SamplingParams(temperature=0.5, logprobs=2, repetition_penalty=2.0)]
    batch = Batch([4], 3, params)
    row = int(batch.numbers[0])
    assert batch.rows.num_live == 1
    batch.rows.apply(replace(batch.step, new_rows=[], freed_rows=[row]))
    assert batch.rows.num_live == 0
    assert not batch.rows.edits
    assert not batch.rows.has_edits.any()
    assert (batch.rows.num_logprobs == -1).all()
    assert (batch.rows.num_prompt_logprobs == -1).all()


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 255, 256])
def test_shapes_hold_any_step_and_are_few(num_tokens):
    buckets = StepBuckets(step_policy(MAX_LEN), NUM_ROWS, 256, BLOCK)
    usual = set(buckets.usual())
    assert len(usual) < 20
    for num_rows in range(1, min(num_tokens, NUM_ROWS) + 1):
        for longest in (1, 256, 257, MAX_LEN):
            for has_prompts in {num_tokens > num_rows, False} - (
                set() if num_tokens == num_rows else {False}
            ):
                shape = buckets.shape(num_tokens, num_rows, longest, has_prompts)
                assert shape in usual
                assert shape.tokens >= num_tokens
                assert shape.rows >= num_rows
                assert shape.blocks * BLOCK >= longest
