import json
import threading

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.trainers import BpeTrainer, UnigramTrainer, WordPieceTrainer

from cardan.core.text import TextError, Tokenizer, load_tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 2024, isn't it?",
    "def main(argv):\n\treturn [x ** 2 for x in range(10)]\r\n",
    "日本語のテキスト と ünïcödé with  double   spaces",
    "the then there these hello help held world word work",
] * 4
TEXTS = [
    "",
    " ",
    "hello world",
    "  two  spaces ",
    "tab\tnew\nline\r\n\r\n",
    "日本 mañana 👩‍👩‍👧‍👦🏽 \U0001f1e8\U0001f1ed",
    "x<|end|>y <|end|> z",
    "<tool>{}</tool>",
    "1234567.89e-10",
    "\x00\x7f\u0301\u200d\ufffd\U0010ffff",
]


def byte_level_backend():
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(
        vocab_size=400,
        initial_alphabet=alphabet,
        special_tokens=["<|begin|>", "<|end|>"],
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return backend


def spm_backend(strip=True):
    source = Backend(models.BPE())
    source.normalizer = normalizers.Replace(" ", "▁")
    source.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    source.train_from_iterator(CORPUS, BpeTrainer(vocab_size=160, show_progress=False))
    model = json.loads(source.to_str())["model"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [token for token in model["vocab"] if token not in tokens]
    backend = Backend(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[tuple(pair) for pair in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return backend


def word_piece_backend():
    backend = Backend(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer = WordPieceTrainer(
        vocab_size=120, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def unigram_backend():
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = UnigramTrainer(
        vocab_size=90, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


BACKENDS = {
    "byte_level": byte_level_backend,
    "spm": spm_backend,
    "word_piece": word_piece_backend,
    "unigram": unigram_backend,
}


def write_model(directory, backend, tokenizer_config=None, **files):
    backend.save(str(directory / "tokenizer.json"))
    base = {"tokenizer_class": "PreTrainedTokenizerFast", **(tokenizer_config or {})}
    (directory / "tokenizer_config.json").write_text(json.dumps(base))
    for name, value in files.items():
        (directory / f"{name}.json").write_text(json.dumps(value))
    return directory


def auto(directory):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(directory))


def compare_ids(ours, theirs):
    assert ours.vocab_size == len(theirs)
    for text in TEXTS:
        for special in (False, True):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special), text
            for skip in (False, True):
                assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", sorted(BACKENDS))
def test_ids_and_text_equal_transformers(kind, tmp_path):
    config = {"eos_token": "</s>"} if kind in ("spm", "unigram") else {}
    write_model(tmp_path, BACKENDS[kind](), config)
    compare_ids(load_tokenizer(tmp_path), auto(tmp_path))


@pytest.mark.parametrize("config", [{"add_bos_token": False}, {"add_eos_token": True}, {}])
@pytest.mark.parametrize("kind", ["spm", "byte_level"])
def test_begin_and_end_flags_equal_transformers(kind, config, tmp_path):
    names = ("<s>", "</s>") if kind == "spm" else ("<|begin|>", "<|end|>")
    roles = {"bos_token": names[0], "eos_token": names[1]}
    write_model(tmp_path, BACKENDS[kind](), {**roles, **config})
    ours = load_tokenizer(tmp_path)
    compare_ids(ours, auto(tmp_path))
    assert dict(ours.special_tokens) == roles
    assert ours.bos_token_id == auto(tmp_path).bos_token_id
    assert ours.eos_token_ids == {auto(tmp_path).eos_token_id}


def test_tokens_of_the_config_equal_transformers(tmp_path):
    backend = byte_level_backend()
    size = backend.get_vocab_size()
    flags = {"lstrip": True, "rstrip": False, "normalized": False, "single_word": False}
    added = {
        str(size + 1): {"content": "<two>", "special": False, **flags},
        str(size): {"content": "<one>", "special": True, **flags},
    }
    config = {
        "added_tokens_decoder": added,
        "bos_token": "<|begin|>",
        "pad_token": {"content": "<pad>", "__type": "AddedToken", **flags},
        "additional_special_tokens": ["<extra>"],
        "image_token": "<image>",
    }
    write_model(tmp_path, backend, config)
    ours, theirs = load_tokenizer(tmp_path), auto(tmp_path)
    compare_ids(ours, theirs)
    for text in ("a <one> b<two><pad> c<extra><image>", "<one><two>"):
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert dict(ours.special_tokens) == theirs.special_tokens_map
    assert ours.special_token_ids >= set(theirs.all_special_ids)


def test_older_side_files_equal_transformers(tmp_path):
    backend = byte_level_backend()
    size = backend.get_vocab_size()
    write_model(
        tmp_path,
        backend,
        special_tokens_map={
            "eos_token": {"content": "<stop>", "lstrip": False},
            "bos_token": "<s>",
        },
        added_tokens={"<stop>": size, "<plain>": size + 1},
    )
    ours, theirs = load_tokenizer(tmp_path), auto(tmp_path)
    compare_ids(ours, theirs)
    text = "a<stop>b<plain>c<s>"
    assert ours.encode(text) == theirs.encode(text)
    assert dict(ours.special_tokens) == theirs.special_tokens_map
    assert ours.eos_token_ids == {size}


def test_baked_truncation_and_padding_are_off(tmp_path):
    backend = byte_level_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=9)
    write_model(tmp_path, backend, {"model_max_length": 4})
    ours = load_tokenizer(tmp_path)
    assert ours.decode(ours.encode("hello world " * 9)) == "hello world " * 9
    assert len(ours.encode("he")) < 4
    assert ours.max_length == 4


def test_end_ids(tmp_path):
    write_model(
        tmp_path,
        byte_level_backend(),
        {"eos_token": "<|end|>", "model_max_length": 1e30},
        config={"eos_token_id": 7},
    )
    assert load_tokenizer(tmp_path).eos_token_ids == {1, 7}
    assert load_tokenizer(tmp_path).max_length is None
    assert load_tokenizer(tmp_path, {"eos_token_id": [3, 4]}).eos_token_ids == {1, 3, 4}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5]}')
    assert load_tokenizer(tmp_path).eos_token_ids == {1, 5}
    with pytest.raises(TextError, match="eos_token_id in generation_config is 'x'"):
        load_tokenizer(tmp_path, {"eos_token_id": "x"})


def test_chat_template_files(tmp_path):
    assert load_tokenizer(write_model(tmp_path, byte_level_backend())).chat_template is None
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    write_model(tmp_path, byte_level_backend(), {"chat_template": named})
    assert load_tokenizer(tmp_path).chat_template == "D"
    assert dict(load_tokenizer(tmp_path).chat_templates) == {"default": "D", "tool_use": "T"}
    assert auto(tmp_path).chat_template == {"default": "D", "tool_use": "T"}
    (tmp_path / "chat_template.json").write_text('{"chat_template": "J"}')
    assert load_tokenizer(tmp_path).chat_template == "J"
    (tmp_path / "chat_template.jinja").write_text("F")
    assert load_tokenizer(tmp_path).chat_template == "F" == auto(tmp_path).chat_template
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("R")
    assert dict(load_tokenizer(tmp_path).chat_templates) == {"default": "F", "rag": "R"}


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(TextError, match=r"holds no tokenizer.json; give a directory"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(TextError, match=r"only a SentencePiece model; convert it once"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TextError, match="is no valid tokenizer file"):
        load_tokenizer(tmp_path)
    write_model(tmp_path, byte_level_backend())
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(TextError, match=r"tokenizer_config.json is no valid JSON"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(TextError, match="holds a list; it must hold an object"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("kind", ["byte_level", "spm"])
def test_bytes_of_the_tokens_make_the_text(kind):
    tokenizer = Tokenizer(BACKENDS[kind]())
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        data = b"".join(map(tokenizer.token_bytes, ids))
        expected = text.encode()
        if kind == "spm" and text:
            # The space that SentencePiece puts in front belongs to the first token.
            expected = b" " + expected
        assert data == expected, text


def test_token_texts():
    tokenizer = Tokenizer(spm_backend())
    text_of = {
        tokenizer.token_string(i): tokenizer.token_text(i) for i in range(tokenizer.vocab_size)
    }
    assert text_of["<0x0A>"] == "\n"
    assert text_of["<0xF0>"] == "\\xf0"
    assert text_of["▁the"] == " the"
    assert text_of["</s>"] == "</s>"
    assert tokenizer.token_bytes(3 + 0xF0) == b"\xf0"
    byte_level = Tokenizer(byte_level_backend())
    half = byte_level.encode("👩")[0]
    assert byte_level.token_text(half) == "\\xf0"
    assert byte_level.token_bytes(byte_level.encode("<|end|>")[0]) == b"<|end|>"
    texts = [byte_level.token_text(i) for i in range(byte_level.vocab_size)]
    assert len(set(texts)) == len(texts)


def test_ids_out_of_range():
    tokenizer = Tokenizer(byte_level_backend())
    size = tokenizer.vocab_size
    assert tokenizer.token_string(size - 1) == "<tool>"
    for call in (tokenizer.token_text, tokenizer.token_bytes, tokenizer.token_string):
        for bad in (-1, size):
            with pytest.raises(
                ValueError, match=f"token id {bad} is out of range.* 0 to {size - 1}"
            ):
                call(bad)
    with pytest.raises(ValueError, match=f"token id {size} is out of range"):
        tokenizer.decode([0, size])


def test_ids_without_a_token_have_no_text():
    backend = Backend(models.BPE(vocab={"a": 0, "b": 2, "c": 5}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(backend)
    assert tokenizer.token_string(1) == tokenizer.token_text(1) == tokenizer.decode([1]) == ""


@pytest.mark.parametrize("kind", sorted(BACKENDS))
def test_batch_equals_single(kind):
    tokenizer = Tokenizer(BACKENDS[kind]())
    assert tokenizer.encode_batch(TEXTS) == [tokenizer.encode(text) for text in TEXTS]
    plain = [tokenizer.encode(text, allow_special=False) for text in TEXTS]
    assert tokenizer.encode_batch(TEXTS, allow_special=False) == plain
    assert tokenizer.encode_batch([]) == []


def test_user_text_does_not_become_a_control_token(tmp_path):
    roles = {"bos_token": "<s>", "eos_token": "</s>"}
    write_model(tmp_path, spm_backend(), roles)
    ours, theirs = load_tokenizer(tmp_path), auto(tmp_path)
    for text in ("a</s>b", "<s>", "</s></s>", "<unk> x", "plain", "< s>"):
        for special in (False, True):
            ids = ours.encode(text, special, allow_special=False)
            oracle = theirs.encode(text, add_special_tokens=special, split_special_tokens=True)
            assert ids == oracle, text
            assert ours.decode(ids) == text
    assert 2 in ours.encode("a</s>b")


def test_added_tokens_are_control_tokens_too():
    tokenizer = Tokenizer(byte_level_backend())
    (tool,) = tokenizer.encode("<tool>")
    ids = tokenizer.encode("<tool><|end|>", allow_special=False)
    assert tool not in ids
    assert not tokenizer.special_token_ids.intersection(ids)
    assert tokenizer.decode(ids) == "<tool><|end|>"


def test_white_space_tokens_stay_ordinary_text():
    backend = byte_level_backend()
    backend.add_tokens([AddedToken("\n\n", special=False, normalized=False)])
    tokenizer = Tokenizer(backend)
    text = "a\n\nb"
    assert tokenizer.encode(text, allow_special=False) == tokenizer.encode(text)
    (newlines,) = tokenizer.encode("\n\n")
    assert newlines in tokenizer.encode("a\n\nb<|end|>", allow_special=False)


def test_text_that_only_a_control_token_can_write():
    backend = Backend(models.WordLevel({"<end>": 0, "a": 1, "?": 2}, unk_token="?"))
    backend.add_special_tokens(["<end>"])
    with pytest.raises(TextError, match="'<end>', which this vocabulary cannot write"):
        Tokenizer(backend).encode("<end>", allow_special=False)


def test_threads_do_not_mix_modes():
    tokenizer = Tokenizer(byte_level_backend())
    wanted = {flag: tokenizer.encode("x<|end|>" * 50, allow_special=flag) for flag in (True, False)}
    assert wanted[True] != wanted[False]
    wrong = []

    def work(flag):
        for _ in range(50):
            if tokenizer.encode("x<|end|>" * 50, allow_special=flag) != wanted[flag]:
                wrong.append(flag)

    threads = [threading.Thread(target=work, args=(i % 2 == 0,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_adjacent_added_tokens_without_spaces():
    tokenizer = Tokenizer(word_piece_backend())
    ids = [1, 2, 2, *tokenizer.encode("the"), 2, 1]
    assert tokenizer.decode(ids, False) == "[CLS] [SEP] [SEP] the [SEP] [CLS]"
    assert tokenizer.decode(ids, False, False) == "[CLS][SEP][SEP] the [SEP][CLS]"
    assert tokenizer.decode(ids, True, False) == "the"


@pytest.mark.parametrize("bad", ["a\ud800b", "\udfff"])
def test_invalid_unicode(bad):
    with pytest.raises(TextError, match="lone surrogate at character"):
        Tokenizer(byte_level_backend()).encode(bad)


def test_only_strings_are_text():
    with pytest.raises(TextError, match="text 1 is a int; give a string"):
        Tokenizer(byte_level_backend()).encode_batch(["a", 5])


def test_json_round_trip():
    tokenizer = Tokenizer(byte_level_backend())
    again = Tokenizer(Backend.from_str(tokenizer.to_json()))
    assert again.encode_batch(TEXTS) == tokenizer.encode_batch(TEXTS)
