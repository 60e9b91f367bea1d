"""GGUF files that are damaged or made to harm, read as a whole model is."""

import math
import os
import random
import struct

import pytest
from hostile_models import (
    METADATA,
    check_refusal,
    metadata_bytes,
    peak_bytes,
    read,
    start,
    tensors,
    write_gguf,
)
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from weights_helpers import (
    ARRAY,
    BOOL,
    F32,
    F64,
    I32,
    I64,
    STRING,
    U8,
    U32,
    U64,
    gguf_bytes,
    gguf_string,
    model_bytes,
    tensor_entry,
)

from cardan.core.types.errors import CardanError

pytestmark = pytest.mark.timeout(120)

MOST_BYTES = 200 << 20
QUICK = settings(
    max_examples=120,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
FURTHER_KEYS = [
    "general.alignment",
    "general.name",
    "llama.vocab_size",
    "llama.expert_count",
    "llama.attention.key_length",
    "llama.attention.value_length",
    "llama.attention.sliding_window",
    "llama.rope.scaling.type",
    "llama.rope.scaling.factor",
    "llama.rope.scale_linear",
    "split.count",
    "tokenizer.chat_template.tool_use",
    "tokenizer.ggml.add_bos_token",
    "tokenizer.ggml.add_space_prefix",
    "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.padding_token_id",
    "tokenizer.ggml.scores",
    "tokenizer.ggml.unknown_token_id",
]
VALUES = [
    None,
    (BOOL, True),
    (U32, 0),
    (U32, 3),
    (U32, 2**32 - 1),
    (I32, -1),
    (U64, 2**63),
    (I64, -(2**63)),
    (F32, math.nan),
    (F64, math.inf),
    (F64, 1e308),
    (STRING, ""),
    (STRING, "16"),
    (STRING, "x\n\x1b[31m" * 1000),
    (ARRAY, (STRING, [])),
    (ARRAY, (STRING, ["a"] * 260)),
    (ARRAY, (STRING, [""] * 260)),
    (ARRAY, (U32, [])),
    (ARRAY, (U32, [1, 2])),
    (ARRAY, (I32, [-1] * 260)),
    (ARRAY, (F32, [math.nan] * 260)),
    (ARRAY, (ARRAY, [(U32, [1])])),
]


@pytest.fixture(scope="module", autouse=True)
def memory_is_bounded(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "m.gguf"
    write_gguf(path)
    start(path)  # whatever a sound model takes
    before = peak_bytes()
    yield
    assert peak_bytes() - before < MOST_BYTES


def refused(tmp_path, data, work=read):
    """The refusal of a file, or None if it is read."""
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    try:
        work(path)
    except CardanError as error:
        check_refusal(error, "model.gguf")
        return error
    return None


def test_the_whole_models_are_sound(tmp_path):
    assert refused(tmp_path, write_gguf(tmp_path / "m.gguf")) is None
    assert refused(tmp_path, metadata_bytes({}), start) is None


def test_truncation_at_every_boundary(tmp_path):
    data = metadata_bytes({})
    marks = [data.index(key.encode()) for key in METADATA]
    marks += [data.index(name.encode()) for name in tensors()]
    # Around each name: before its length, within the name, behind it, behind the type.
    cuts = {mark + shift for mark in marks for shift in (-8, 0, 3, 30)}
    cuts |= {0, 4, 8, 16, 24, len(data) // 2, len(data) - 1}
    for cut in sorted(cuts):
        assert refused(tmp_path, data[:cut]) is not None, cut


@QUICK
@given(flips=st.lists(st.tuples(st.integers(0, 6000), st.integers(0, 255)), min_size=1, max_size=3))
def test_any_bytes_may_be_wrong(tmp_path, flips):
    data = bytearray(write_gguf(tmp_path / "whole.gguf"))
    for place, value in flips:
        data[place] = value
    refused(tmp_path, bytes(data))


def test_flipped_bits_of_the_header(tmp_path):
    rng = random.Random(1)
    data = write_gguf(tmp_path / "whole.gguf")
    # The structure is dense at the start and in the tensor table.
    table = data.index(b"token_embd.weight")
    places = [*range(600), *range(table - 8, table + 600)]
    for place in rng.sample(places, 150):
        broken = bytearray(data)
        broken[place] ^= 1 << rng.randrange(8)
        refused(tmp_path, bytes(broken))


@QUICK
@given(key=st.sampled_from([*METADATA, *FURTHER_KEYS]), value=st.sampled_from(VALUES))
@example("tokenizer.ggml.tokens", (ARRAY, (F32, [math.nan] * 260)))
@example("tokenizer.ggml.merges", (ARRAY, (U32, [1, 2])))
@example("tokenizer.ggml.bos_token_id", (F32, math.nan))
@example("tokenizer.ggml.eos_token_id", (STRING, "16"))
@example("tokenizer.ggml.add_bos_token", (ARRAY, (U32, [1, 2])))
@example("tokenizer.ggml.model", (ARRAY, (F32, [math.nan] * 260)))
@example("split.count", (ARRAY, (U32, [1, 2])))
@example("general.architecture", (STRING, "x\n\x1b[31m" * 1000))
def test_metadata_of_the_wrong_type(tmp_path, key, value):
    refused(tmp_path, metadata_bytes({key: value}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.bos_token_id": (STRING, "16")}, "bos_token_id is '16', .* a token id"),
        ({"tokenizer.ggml.bos_token_id": (BOOL, True)}, "bos_token_id is True, .* a token id"),
        ({"tokenizer.ggml.bos_token_id": (I32, -1)}, "bos_token_id is -1, but there are 260"),
        ({"tokenizer.ggml.merges": (ARRAY, (U32, [1]))}, "merges is .* a list of strings"),
        ({"tokenizer.ggml.tokens": (STRING, "abc")}, "tokens is 'abc', .* a list"),
        ({"tokenizer.ggml.tokens": (ARRAY, (STRING, ["a"]))}, "token_type has 260 entries for 1"),
        ({"tokenizer.ggml.token_type": (ARRAY, (F32, [0.5] * 260))}, "token_type is .* whole"),
        ({"tokenizer.ggml.scores": (ARRAY, (F32, [math.nan] * 260))}, "scores is .* of numbers"),
        ({"tokenizer.ggml.scores": (ARRAY, (F32, [0.5] * 259))}, "scores has 259 entries"),
        ({"tokenizer.ggml.add_bos_token": (STRING, "no")}, "add_bos_token is 'no', .* true or"),
        ({"tokenizer.chat_template": (U32, 5)}, "tokenizer.chat_template is 5, .* a string"),
        ({"llama.attention.head_count": (U32, 0)}, "head_count': is 0, must be positive"),
        ({"llama.attention.head_count": (STRING, "2")}, "head_count': '2' is not an integer"),
        ({"llama.attention.head_count": (I32, -2)}, "head_count': is -2, must be positive"),
        ({"llama.block_count": (U32, 2**31)}, "says 2147483648, but the file has no tensors"),
        ({"split.count": (ARRAY, (U32, [1, 2]))}, "split into .* files; join them"),
        ({"general.architecture": (STRING, "\x1b[2J")}, r"'\\x1b\[2J' is not a known GGUF"),
    ],
)
def test_wrong_metadata_are_named(tmp_path, changes, message):
    error = refused(tmp_path, metadata_bytes(changes))
    assert error is not None
    with pytest.raises(CardanError, match=message):
        raise error


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.context_length", 2**31),
        ("llama.context_length", 2**63),
        ("llama.feed_forward_length", 2**31),
        ("llama.feed_forward_length", 2**24),
        ("llama.feed_forward_length", 2**63),
        ("llama.embedding_length", 2**20),
        ("llama.embedding_length", 2**40),
        ("llama.attention.head_count", 2**16),
        ("llama.attention.head_count_kv", 2**40),
        ("llama.rope.dimension_count", 2**63),
    ],
)
def test_a_model_of_absurd_size_is_never_built(tmp_path, key, value):
    error = refused_to_start(tmp_path, metadata_bytes({key: (U64, value)}))
    check_refusal(error)


def refused_to_start(tmp_path, data):
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(CardanError) as caught:
        start(path)
    return caught.value


@pytest.mark.parametrize(
    ("tensor", "shape"),
    [
        ("blk.0.attn_q.weight", (16, 8)),
        ("blk.0.attn_q.weight", (1, 16)),
        ("blk.0.attn_k.weight", (7, 16)),
        ("token_embd.weight", (16,)),
        ("output_norm.weight", (16, 1)),
        ("blk.0.ffn_down.weight", (1, 1, 32, 16)),
    ],
)
def test_tensors_of_the_wrong_shape(tmp_path, tensor, shape):
    arrays = tensors()
    arrays[tensor] = arrays[tensor].reshape(-1)[: math.prod(shape)].reshape(shape)
    triples = [(name, *field) for name, field in METADATA.items()]
    check_refusal(refused_to_start(tmp_path, model_bytes(triples, arrays)))


@pytest.mark.parametrize(
    "body",
    [
        b"GGUF" + struct.pack("<IQQ", 3, 2**63, 1) + b"\0" * 64,
        b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63) + b"\0" * 64,
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62) + b"x" * 64,
        b"FUGG" + struct.pack(">IQQ", 3, 0, 0),
        gguf_bytes([("k", ARRAY, (ARRAY, [(ARRAY, [(ARRAY, [(ARRAY, [(U8, [1])])])])]))]),
        gguf_bytes([], [gguf_string("t") + struct.pack("<I", 2**31) + b"\0" * 64]),
        gguf_bytes([], [tensor_entry("t", (2**32, 2**32), 0, 0)], b"\0" * 64),
        gguf_bytes([], [tensor_entry("t" * 5000, (4,), 0, 2**64 - 32)], b"\0" * 64),
        gguf_bytes([("k" * 100_000, STRING, b"\xff")]),
        gguf_bytes([], [tensor_entry(b"\xff\xfe", (4,), 0, 0)], b"\0" * 64),
        gguf_bytes([], [tensor_entry("a\nb", (4,), 0, 0)] * 2, b"\0" * 64),
        gguf_bytes([("general.architecture", STRING, "llama")], [], b""),
        metadata_bytes({"extra\n\x07": (STRING, "")}) [:-1],
    ],
)  # fmt: skip
def test_lying_structures(tmp_path, body):
    assert refused(tmp_path, body) is not None


def test_unknown_tensors_are_shown_harmlessly(tmp_path):
    triples = [(name, *field) for name, field in METADATA.items()]
    arrays = tensors()
    arrays["evil\n\x1b[31m" * 20] = arrays["output_norm.weight"]
    error = refused(tmp_path, model_bytes(triples, arrays))
    assert error is not None
    assert "have no place in a 'llama' model" in str(error)


def test_things_that_are_no_files(tmp_path):
    pipe = tmp_path / "pipe.gguf"
    os.mkfifo(pipe)
    loop = tmp_path / "loop.gguf"
    loop.symlink_to(loop)
    for path, message in (
        (pipe, "neither a directory nor a regular file"),
        (tmp_path, "is no regular file"),  # whose only GGUF file is the pipe
        (loop, "Too many levels of symbolic links"),
        ("/dev/zero", "neither a directory nor a regular file"),
        (tmp_path / ("n" * 300), "File name too long"),
        ("a\0b.gguf", "is no path"),
        ("~nobody-of-this-name/m.gguf", "is no path"),
    ):
        if path == tmp_path:
            loop.unlink()
        with pytest.raises(CardanError, match=message) as caught:
            read(path)
        check_refusal(caught.value)
        if path == tmp_path:
            loop.symlink_to(loop)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else and back")
def test_files_without_permission(tmp_path):
    path = tmp_path / "secret.gguf"
    write_gguf(path)
    for mode_of, message in ((path, "Permission denied"), (tmp_path, "Permission denied")):
        mode = mode_of.stat().st_mode
        mode_of.chmod(0)
        os.seteuid(65534)
        try:
            with pytest.raises(CardanError, match=message):
                read(path)
        finally:
            os.seteuid(0)
            mode_of.chmod(mode)
