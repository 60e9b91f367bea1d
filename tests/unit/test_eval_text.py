"""Which text is scored, and as which tokens."""

import tomllib
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors

from cardan.bootstrap.model_source import read_model, read_tokenizer
from cardan.core.config.model import ModelConfig
from cardan.core.text import Tokenizer
from cardan.core.types.errors import ConfigError
from cardan.eval.text import SHIPPED, Text, begin_token, encode_text, read_text

ROOT = Path(__file__).parents[2]
TEXTS = ROOT / "cardan/eval/texts"


def make_tokenizer(*, begin=None, end=None):
    """Words a and b; what is put around a text."""
    backend = Backend(models.WordLevel({"<s>": 0, "</s>": 1, "a": 2, "b": 3, "?": 4}, "?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<s>", "</s>"])
    template = " ".join(filter(None, (begin, "$A", end)))
    backend.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return Tokenizer(backend, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})


def test_the_shipped_text():
    text = read_text(None)
    assert text.name == SHIPPED
    assert 20_000 <= len(text.content.encode()) <= 40_000
    assert text.content.startswith("CHAPTER I. Down the Rabbit-Hole\n")
    assert text.content.endswith("the whole party swam to the shore.\n")
    assert text.digest == read_text(TEXTS / SHIPPED).digest
    assert (TEXTS / "alice.source.md").is_file()


def test_the_wheel_packs_the_texts():
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packed = {
        path
        for pattern in data["package-data"]["cardan"]
        for path in (ROOT / "cardan").glob(pattern)
    }
    assert set(TEXTS.iterdir()) <= packed


def test_a_file(tmp_path):
    path = tmp_path / "some.txt"
    path.write_text("a b\n", encoding="utf-8")
    text = read_text(path)
    assert (text.name, text.content) == ("some.txt", "a b\n")
    other = tmp_path / "other"
    other.mkdir()
    (other / "some.txt").write_text("a a\n")
    assert read_text(other / "some.txt").digest != text.digest


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file"),
        (b"", "is empty; give a text"),
        (b" \n\n", "is empty; give a text"),
        (b"abc\xff", r"is not UTF-8 \(byte 3\)"),
    ],
)
def test_bad_files(content, message, tmp_path):
    path = tmp_path / "some.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"{path}: {message}"):
        read_text(path)


def test_a_directory(tmp_path):
    with pytest.raises(ConfigError, match="Is a directory"):
        read_text(tmp_path)


@pytest.mark.parametrize(
    ("around", "begin"),
    [
        ({}, None),
        ({"begin": "<s>"}, 0),
        ({"end": "</s>"}, None),
        ({"begin": "<s>", "end": "</s>"}, 0),
    ],
)
def test_begin_token(around, begin, tmp_path):
    tokenizer = make_tokenizer(**around)
    assert begin_token(tokenizer) == begin
    path = tmp_path / "text"
    path.write_text("a b a")
    assert encode_text(tokenizer, read_text(path)) == [2, 3, 2]


@pytest.mark.model
def test_control_strings_in_a_text_are_no_control_tokens():
    config = ModelConfig(model="demo")
    tokenizer = read_tokenizer(config, read_model(config))
    ids = encode_text(tokenizer, Text("x", "say <|im_end|> now"))
    assert not tokenizer.special_token_ids.intersection(ids)
    assert tokenizer.decode(ids) == "say <|im_end|> now"
