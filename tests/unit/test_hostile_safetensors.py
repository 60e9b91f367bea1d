"""Safetensors files and indexes that are damaged or made to harm."""

import json
import random
import shutil
import struct

import pytest
from hostile_models import check_refusal, peak_bytes, read, start, write_directory
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cardan.core.types.errors import CardanError

pytestmark = pytest.mark.timeout(120)

MOST_BYTES = 200 << 20
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A sound model; memory may not grow much beyond what it takes."""
    directory = write_directory(tmp_path_factory.mktemp("whole") / "model")
    start(directory)
    before = peak_bytes()
    yield directory
    assert peak_bytes() - before < MOST_BYTES


@pytest.fixture
def model(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "model")


def refused(model, work=read):
    try:
        work(model)
    except CardanError as error:
        check_refusal(error)
        return str(error)
    return None


def with_header(header, length=None, data=b"\0" * 64) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def entry(dtype="F32", shape=(4, 4), offsets=(0, 64)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


LIES = {
    "empty": b"",
    "length cut off": b"\x08\0\0",
    "length beyond the file": with_header({"a": entry()}, length=1 << 40),
    "length of everything": with_header({"a": entry()}, length=2**64 - 1),
    "length 0": with_header(b"", length=0),
    "no JSON": with_header(b"\x80\x02pickled"),
    "a list": with_header(b"[]"),
    "no UTF-8": with_header(b'{"\xff": 1}'),
    "nested": with_header(b'{"a":' * 50_000),
    "a long header": with_header(b"{" + b" " * (101 << 20), data=b""),
    "unknown dtype": with_header({"a": entry("F128")}),
    "no shape": with_header({"a": {"dtype": "F32", "data_offsets": [0, 64]}}),
    "negative shape": with_header({"a": entry(shape=(-4, -4))}),
    "huge shape": with_header({"a": entry(shape=(2**62, 2**62))}),
    "span of another size": with_header({"a": entry(offsets=(0, 60))}, data=b"\0" * 60),
    "span beyond the file": with_header({"a": entry(offsets=(64, 128))}),
    "span backwards": with_header({"a": entry(offsets=(64, 0))}),
    "overlap": with_header({"a": entry(), "b": entry()}),
    "gap": with_header({"a": entry(), "b": entry(offsets=(96, 160))}, data=b"\0" * 160),
    "no bytes for it": with_header({"a": entry(shape=(0,), offsets=(0, 0))}, data=b"\0"),
    "metadata of numbers": with_header({"__metadata__": {"a": 1}, "a": entry()}),
}


@pytest.mark.parametrize("case", LIES)
def test_lying_headers(model, case):
    (model / WEIGHTS).write_bytes(LIES[case])
    message = refused(model)
    assert message is not None
    assert WEIGHTS in message
    assert "download it again" in message


def test_duplicate_names_do_no_harm(model):
    header = json.dumps({"a": entry()})[:-1] + ', "a": ' + json.dumps(entry()) + "}"
    (model / WEIGHTS).write_bytes(with_header(header.encode()))
    assert "no place for: 'a'" in (refused(model, start) or "")


def test_every_truncation_of_the_header(model):
    data = (model / WEIGHTS).read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    for cut in (*range(0, size, 37), size - 1, size, size + 1, len(data) - 1):
        (model / WEIGHTS).write_bytes(data[:cut])
        assert refused(model) is not None, cut


@settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(flips=st.lists(st.tuples(st.integers(0, 900), st.integers(0, 255)), min_size=1, max_size=3))
def test_any_bytes_may_be_wrong(whole, model, flips):
    data = bytearray((whole / WEIGHTS).read_bytes())
    for place, value in flips:
        data[place] = value
    (model / WEIGHTS).write_bytes(data)
    refused(model)


def test_digits_of_shapes_and_spans(whole, model):
    rng = random.Random(2)
    data = (whole / WEIGHTS).read_bytes()
    size = int.from_bytes(data[:8], "little")
    digits = [place for place in range(8, 8 + size) if chr(data[place]).isdigit()]
    for place in rng.sample(digits, 60):
        broken = bytearray(data)
        broken[place] = ord(rng.choice("0123456789"))
        (model / WEIGHTS).write_bytes(broken)
        refused(model)


@pytest.mark.parametrize("shape", [(1, 260, 16), (16, 260), (260, 15)])
def test_tensors_that_do_not_fit_the_config(model, shape):
    data = (model / WEIGHTS).read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    name = "model.embed_tokens.weight"
    begin, end = header[name]["data_offsets"]
    header[name]["shape"] = list(shape)
    if shape == (260, 15):  # the same bytes as shorter numbers
        header[name] |= {"shape": [end - begin], "dtype": "U8"}
    (model / WEIGHTS).write_bytes(with_header(header, data=data[8 + size :]))
    assert "the checkpoint does not fit the model" in (refused(model, start) or "")


@pytest.mark.parametrize(
    "file",
    [
        "../outside.safetensors",
        "/etc/passwd",
        "sub/../../outside.safetensors",
        ".",
        "..",
        "",
        "a\0b",
        "n" * 300,
        7,
        None,
        ["model.safetensors"],
    ],
)
def test_an_index_cannot_lead_out_of_the_directory(model, file):
    shutil.copy(model / WEIGHTS, model.parent / "outside.safetensors")
    (model / INDEX).write_text(json.dumps({"weight_map": {"a": file}}))
    message = refused(model)
    assert message is not None
    assert "plain file name" in message or "missing" in message


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b"[" * 200_000, "not valid JSON"),
        (b"[]", "must hold a JSON object"),
        (b'{"weight_map": []}', "'weight_map' must be an object"),
        (b'{"weight_map": {"\\u001b[31m\\n": 5}}', "is not a plain file name"),
        (b'{"weight_map": {"a": "gone.safetensors"}}', "1 of 1 shards are missing"),
        (b'{"weight_map": {"ghost": "model.safetensors"}}', "has no tensor 'ghost'"),
    ],
)
def test_bad_indexes(model, index, message):
    (model / INDEX).write_bytes(index)
    assert message in (refused(model) or "")


def test_pickles_are_never_loaded(model):
    (model / WEIGHTS).rename(model / "pytorch_model.bin")
    assert "pickle only (pytorch_model.bin)" in (refused(model) or "")
