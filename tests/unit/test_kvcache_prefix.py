"""Names of blocks: equal where the KV is equal, different where anything differs."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cardan.core.kvcache.prefix import extend_chain, root_hash
from cardan.core.types.request import MediaSpan

SETTINGS = settings(max_examples=150, deadline=None, derandomize=True, database=None)
TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=12)
SPANS = st.lists(
    st.builds(MediaSpan, st.integers(0, 8), st.integers(1, 5), st.sampled_from(["a", "b", ""])),
    max_size=2,
)
TEXTS = st.one_of(st.none(), st.text(max_size=3))


def chain(token_ids, size=2, salt=None, adapter=None, media=()):
    hashes = []
    array = np.array(token_ids, np.int32)
    extend_chain(hashes, root_hash(salt, adapter), array, size, len(token_ids) // size, media)
    return hashes


def visible(token_ids, size, media, block):
    """Everything that shapes the KV of a block, as plain data."""
    stop = (block + 1) * size
    seen = sorted((span.offset, span.length, span.key) for span in media if span.offset < stop)
    return tuple(token_ids[:stop]), tuple(seen)


@SETTINGS
@given(TOKENS, TOKENS, TEXTS, TEXTS, TEXTS, TEXTS)
def test_hashes_are_equal_exactly_for_equal_prefixes(one, two, salt1, salt2, adapter1, adapter2):
    chain1 = chain(one, 2, salt1, adapter1)
    chain2 = chain(two, 2, salt2, adapter2)
    for index, (left, right) in enumerate(zip(chain1, chain2, strict=False)):
        stop = 2 * (index + 1)
        same = (one[:stop], salt1, adapter1) == (two[:stop], salt2, adapter2)
        assert (left == right) == same
    assert len(set(chain1)) == len(chain1)


@SETTINGS
@given(TOKENS, SPANS, SPANS)
def test_media_tell_blocks_apart(token_ids, media1, media2):
    chain1, chain2 = chain(token_ids, 3, media=media1), chain(token_ids, 3, media=media2)
    for index, (left, right) in enumerate(zip(chain1, chain2, strict=True)):
        if left == right:
            assert visible(token_ids, 3, media1, index) == visible(token_ids, 3, media2, index)
        elif media1 == media2:
            pytest.fail("equal input, different names")


@SETTINGS
@given(TOKENS, st.integers(1, 4), SPANS, st.integers(0, 12))
def test_a_chain_grown_in_parts_is_the_chain_made_at_once(token_ids, size, media, cut):
    whole = chain(token_ids, size, media=media)
    parts = []
    array, root = np.array(token_ids, np.int32), root_hash(None, None)
    for count in sorted({min(cut, len(whole)), len(whole)}):
        # The array may be longer the second time: only whole blocks count.
        extend_chain(parts, root, array[: max(count * size, 1)], size, count, media)
    assert parts == whole
    extend_chain(parts, root, array, size, 0, media)
    assert parts == whole


def test_a_change_of_one_token_changes_its_block_and_all_later_ones():
    token_ids = list(range(12))
    before = chain(token_ids, 3)
    for place in range(12):
        after = chain([*token_ids[:place], 99, *token_ids[place + 1 :]], 3)
        same = [left == right for left, right in zip(before, after, strict=True)]
        assert same == [index < place // 3 for index in range(4)]


def test_a_block_of_equal_tokens_has_another_name_after_another_parent():
    hashes = chain([7, 7] * 50)
    assert len(set(hashes)) == 50


def test_roots_of_all_domains_differ():
    texts = [None, "", "x", "xx", "S", "A", "\x00", "S\x01", "é", "e\u0301", "\ud800"]
    roots = [root_hash(salt, adapter) for salt, adapter in itertools.product(texts, texts)]
    assert len(set(roots)) == len(texts) ** 2


def test_text_that_imitates_the_encoding_collides_with_nothing():
    """The parts are written as tag, length, bytes: write them by hand into a value."""

    def part(tag, value):
        return tag + len(value).to_bytes(8, "little").decode("latin-1") + value

    crafted = [
        root_hash("x", "y"),
        root_hash("x" + part("A", "y"), None),
        root_hash(None, part("S", "x") + "y"),
        root_hash("xy", None),
        root_hash(None, "xy"),
        root_hash("", "xy"),
        root_hash("xy", ""),
    ]
    assert len(set(crafted)) == len(crafted)


def test_media_that_imitate_each_other_collide_with_nothing():
    token_ids = [5] * 8
    variants = [
        (),
        (MediaSpan(0, 8, "k"),),
        (MediaSpan(0, 7, "k"),),
        (MediaSpan(1, 7, "k"),),
        (MediaSpan(0, 8, ""),),
        (MediaSpan(0, 8, "8:k"),),
        (MediaSpan(0, 88, "k"),),
        (MediaSpan(0, 4, "k"), MediaSpan(4, 4, "k")),
        (MediaSpan(0, 4, "a"), MediaSpan(4, 4, "b")),
        (MediaSpan(0, 4, "b"), MediaSpan(4, 4, "a")),
        (MediaSpan(0, 4, "ab"), MediaSpan(4, 4, "")),
    ]
    assert len({chain(token_ids, 8, media=media)[0] for media in variants}) == len(variants)


def test_a_later_item_leaves_earlier_blocks_alone_and_reaches_through_later_ones():
    token_ids = [5] * 12
    plain = chain(token_ids, 3)
    same = [
        left == right
        for left, right in zip(
            plain, chain(token_ids, 3, media=(MediaSpan(4, 4, "k"),)), strict=True
        )
    ]
    # The item covers 4 to 7: blocks 1 and 2 hold it, block 3 follows it.
    assert same == [True, False, False, False]


def test_the_width_of_token_ids_in_memory_does_not_matter():
    wide, narrow = [], []
    root = root_hash(None, None)
    extend_chain(wide, root, np.array([1, 2, 3, 4], np.int64)[::1], 2, 2)
    extend_chain(narrow, root, np.array([1, 9, 2, 9, 3, 9, 4, 9], np.int32)[::2], 2, 2)
    assert wide == narrow
