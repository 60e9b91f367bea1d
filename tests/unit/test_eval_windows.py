"""Windows over a text: brute force, and the recipe of Hugging Face's guide."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cardan.core.types.errors import ConfigError
from cardan.eval.windows import WindowOptions, cut_windows

BOS = -1


@st.composite
def cuts(draw):
    """(number of tokens, context, stride, begin token) that fit together."""
    context = draw(st.integers(2, 20))
    stride = draw(st.integers(1, context))
    count = draw(st.integers(context, 90))
    return count, context, stride, draw(st.sampled_from([None, BOS]))


@given(cuts())
def test_every_token_is_scored_once_with_enough_context(cut):
    """Token i of the text has the id i, so windows say where they are from."""
    count, context, stride, bos = cut
    windows = cut_windows(range(count), WindowOptions(context=context, stride=stride), bos)
    num_begin = bos is not None
    length = context - num_begin
    scored = [token for window in windows for token in window.scored]
    # Brute force: a token counts if a window holds it with something before it, and it is none of
    # those that the first window only has as context.
    starts = range(0, count, min(stride, length))
    unscored_start = length - min(stride, length)
    lone = {start for start in starts if not num_begin and stride >= length}
    expected = [token for token in range(unscored_start, count) if token not in lone]
    if not num_begin and unscored_start == 0:
        expected = [token for token in expected if token != 0]
    assert scored == expected
    for window in windows:
        ids = list(window.token_ids)
        assert len(ids) <= context
        assert ids[:num_begin] == [BOS] * num_begin
        text = ids[num_begin:]
        assert text == list(range(text[0], text[0] + len(text)))
        assert window.first >= max(1, context - stride)
    assert all(len(window.token_ids) == context for window in windows[:-1])


def hugging_face_recipe(count, max_length, stride):
    """(token, first token of its window) of all that the guide's loop scores."""
    scored = {}
    previous_end = 0
    for begin in range(0, count, stride):
        end = min(begin + max_length, count)
        target_length = end - previous_end
        for token in range(max(end - target_length, begin + 1), end):
            scored[token] = begin
        previous_end = end
        if end == count:
            break
    return scored


@given(cuts())
def test_the_recipe_of_hugging_face(cut):
    """The same tokens with the same context, the start of the first window aside."""
    count, context, stride, _bos = cut
    ours = {
        token: window.token_ids[0]
        for window in cut_windows(range(count), WindowOptions(context=context, stride=stride), None)
        for token in window.scored
    }
    theirs = hugging_face_recipe(count, context, stride)
    assert ours == {token: start for token, start in theirs.items() if token >= context - stride}


def test_defaults_score_the_second_half_of_each_window():
    windows = cut_windows(range(2000), WindowOptions(), None)
    assert windows[0].first == 256
    assert [window.token_ids[0] for window in windows] == list(range(0, 1537, 256))
    assert sum(len(window.scored) for window in windows) == 2000 - 256


def test_max_tokens():
    options = WindowOptions(context=8, stride=4, max_tokens=10)
    assert cut_windows(range(50), options, None)[-1].token_ids[-1] == 9
    everything = WindowOptions(context=8, stride=4, max_tokens=0)
    assert cut_windows(range(5000), everything, None)[-1].token_ids[-1] == 4999


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context": 1}, "context is 1; it must be at least 2"),
        ({"context": 8, "stride": 0}, "stride is 0; it must be from 1 to the context of 8 tokens"),
        ({"context": 8, "stride": 9}, "stride is 9; it must be from 1 to the context of 8 tokens"),
        ({"context": 8, "max_tokens": 7}, "max_tokens is 7, less than one window of 8 tokens"),
    ],
)
def test_what_cannot_be(changes, message):
    with pytest.raises(ConfigError, match=message):
        cut_windows(range(100), WindowOptions(**changes), None)


@pytest.mark.parametrize(("bos", "needed"), [(None, 8), (BOS, 7)])
def test_a_text_shorter_than_a_window(bos, needed):
    options = WindowOptions(context=8)
    with pytest.raises(ConfigError, match=f"has {needed - 1} tokens, a window needs {needed}"):
        cut_windows(range(needed - 1), options, bos)
    assert len(cut_windows(range(needed), options, bos)) == 1
