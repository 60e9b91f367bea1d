import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from cardan.core.text import Detokenizer, Tokenizer

WORDS = ["▁", "▁▁", "a", "▁a", "the", "▁the", "é", "日", "▁x▁", "\n", ".", ",▁", "▁\ufffd"]
FAMILIES = "👩‍👩‍👧‍👦 👩🏽‍🚀 🏳️‍🌈 🇨🇭 🏴\U000e0067\U000e0062\U000e007f e\u0301\u0300 ❤️‍🔥"
BYTE_FALLBACK = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


@functools.cache
def byte_level():
    pairs = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("ð", "Ł"), ("ã", "ģ"), ("Ģ", "Ģ"), ("Ġ", "ð")]
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for pair in pairs:
        vocab["".join(pair)] = len(vocab)
    backend = Backend(models.BPE(vocab=vocab, merges=pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "<|end|>", "<｜日｜>"])
    backend.add_tokens([AddedToken("<think>", special=False, normalized=False), "é"])
    return Tokenizer(backend)


@functools.cache
def spm(strip=1):
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [*BYTE_FALLBACK, decoders.Strip(" ", strip, 0)] if strip else BYTE_FALLBACK
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return Tokenizer(backend)


def other(decoder):
    tokens = ["[UNK]", "[SEP]", "[CLS]", "the", "##ing", "▁a", "▁", "b", "c</w>", ".", "n't", "é"]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Backend(models.WordLevel(vocab, unk_token="[UNK]"))
    backend.decoder = decoder
    backend.add_special_tokens(["[UNK]", "[SEP]", "[CLS]"])
    return Tokenizer(backend)


OTHERS = {
    "word_piece": other(decoders.WordPiece(cleanup=False)),
    "metaspace": other(decoders.Metaspace()),
    "metaspace_never": other(decoders.Metaspace(prepend_scheme="never")),
    "bpe_suffix": other(decoders.BPEDecoder()),
    "none": other(decoders.Fuse()),
}


def stream(tokenizer, ids, prompt=(), cuts=1, **options):
    detokenizer = Detokenizer(tokenizer, prompt_token_ids=prompt, **options)
    text = ""
    for start in range(0, len(ids), cuts):
        text += detokenizer.push(ids[start : start + cuts])
        assert detokenizer.text_length == len(text)
    text += detokenizer.flush()
    assert detokenizer.text_length == len(text)
    assert detokenizer.flush() == ""
    return text


def ids_of(tokenizer):
    """Random ids, ids of random text of all planes, and such ids cut somewhere."""
    size = tokenizer.vocab_size
    noise = st.lists(st.integers(0, size - 1), max_size=40)
    text = st.one_of(
        st.text(max_size=20),
        st.text(alphabet=st.sampled_from(FAMILIES + " \n▁"), max_size=30),
        st.just(FAMILIES),
    )
    written = text.map(lambda value: tokenizer.encode(value, add_special_tokens=False))
    cut = st.tuples(written, st.integers(0, 200)).map(lambda pair: pair[0][: pair[1]])
    mixed = st.tuples(written, noise, cut).map(lambda parts: [i for part in parts for i in part])
    return st.one_of(noise, written, cut, mixed)


@settings(max_examples=300, deadline=None)
@given(ids_of(byte_level()), st.lists(st.integers(0, 265), max_size=5), st.booleans(), st.data())
def test_byte_level_equals_one_shot(ids, prompt, skip, data):
    tokenizer = byte_level()
    expected = tokenizer.decode(ids, skip)
    cuts = data.draw(st.integers(1, 5))
    assert stream(tokenizer, ids, prompt, cuts, skip_special_tokens=skip) == expected


@settings(max_examples=300, deadline=None)
@given(ids_of(spm()), st.booleans(), st.integers(0, 2), st.integers(1, 5))
def test_byte_fallback_equals_one_shot(ids, skip, strip, cuts):
    tokenizer = spm(strip)
    expected = tokenizer.decode(ids, skip)
    assert stream(tokenizer, ids, (), cuts, skip_special_tokens=skip) == expected


@settings(max_examples=300, deadline=None)
@given(ids_of(spm()), ids_of(spm()), st.booleans(), st.integers(0, 2))
def test_byte_fallback_behind_a_prompt_equals_one_shot(prompt, ids, skip, strip):
    tokenizer = spm(strip)
    while prompt and (3 <= prompt[-1] < 259 or (skip and prompt[-1] < 3)):
        prompt = prompt[:-1]
    both = tokenizer.decode(prompt + ids, skip)
    expected = both[len(tokenizer.decode(prompt, skip)) :]
    assert stream(tokenizer, ids, prompt, skip_special_tokens=skip) == expected


@pytest.mark.parametrize("kind", sorted(OTHERS))
def test_other_decoders_equal_one_shot(kind):
    tokenizer = OTHERS[kind]
    noise = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=20)

    @settings(max_examples=60, deadline=None)
    @given(noise, noise, st.booleans(), st.booleans(), st.integers(1, 3))
    def check(prompt, ids, skip, spaces, cuts):
        options = {"skip_special_tokens": skip, "spaces_between_special_tokens": spaces}
        before = tokenizer.decode(prompt, skip, spaces)
        expected = tokenizer.decode(prompt + ids, skip, spaces)[len(before) :]
        assert stream(tokenizer, ids, prompt, cuts, **options) == expected

    check()


@pytest.mark.parametrize("make", [byte_level, spm])
def test_half_characters_are_never_given_out(make):
    tokenizer = make()
    text = FAMILIES + "日本\U0010ffff\ufffd"
    ids = tokenizer.encode(text, add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer)
    given_out = ""
    for token_id in ids:
        given_out += detokenizer.push([token_id])
        assert text.startswith(given_out)
    assert given_out + detokenizer.flush() == text


def test_a_character_cut_by_the_end_comes_out_as_in_the_one_shot():
    for tokenizer in (byte_level(), spm()):
        ids = tokenizer.encode("x👩", add_special_tokens=False)[:-1]
        detokenizer = Detokenizer(tokenizer)
        assert "\ufffd" not in detokenizer.push(ids)
        assert "\ufffd" in detokenizer.flush()


def test_the_leading_space_depends_on_the_prompt():
    tokenizer = spm()
    (the,) = (i for i in range(tokenizer.vocab_size) if tokenizer.token_string(i) == "▁the")
    assert stream(tokenizer, [the, the]) == "the the"
    assert stream(tokenizer, [the, the], prompt=[the]) == " the the"
    assert stream(tokenizer, [the], prompt=[1]) == "the"
    assert stream(tokenizer, [the], prompt=[1], skip_special_tokens=False) == " the"


def test_a_character_does_not_span_prompt_and_output():
    tokenizer = spm()
    half = [3 + byte for byte in "é".encode()]
    assert stream(tokenizer, half[1:], prompt=half[:1]) == "\ufffd"
    byte = byte_level()
    ids = byte.encode("日")
    assert stream(byte, ids[1:], prompt=ids[:1]) == byte.decode(ids[1:])


@pytest.mark.parametrize("make", [byte_level, spm, lambda: OTHERS["word_piece"]])
def test_padded_logits_rows_have_no_text(make):
    tokenizer = make()
    ids = [7, tokenizer.vocab_size, 8, tokenizer.vocab_size + 5000]
    assert stream(tokenizer, ids) == tokenizer.decode([7, 8])
    with pytest.raises(ValueError, match="token id -1 is negative"):
        Detokenizer(tokenizer).push([-1])


class CountingTokenizer(Tokenizer):
    """Counts the ids that are decoded through the library."""

    decoded = 0

    def decode(self, ids, *args, **kwargs):
        self.decoded += len(ids)
        return super().decode(ids, *args, **kwargs)


def test_work_for_a_token_does_not_grow():
    backend = Backend.from_str(OTHERS["word_piece"].to_json())
    counts = []
    for length in (200, 400):
        tokenizer = CountingTokenizer(backend)
        stream(tokenizer, [3, 4] * (length // 2), prompt=[3] * 10_000)
        counts.append(tokenizer.decoded)
    assert counts[1] <= 2 * counts[0]
    assert counts[0] <= 200 * 12 + 20
