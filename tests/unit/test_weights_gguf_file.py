"""The GGUF reader against the `gguf` package, and against files that lie."""

import mmap
import random
import struct

import gguf
import numpy as np
import pytest
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
    gguf_bytes,
    gguf_string,
    tensor_entry,
)

from cardan.core.interfaces.errors import WeightsError
from cardan.core.types.ggml import BLOCK_FORMATS, GGMLType
from cardan.core.weights.gguf_file import GGUFFile


def write(tmp_path, data):
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    return path


def f32_entry(name="t", dims=(4,), offset=0):
    return tensor_entry(name, dims, 0, offset)


def test_type_table_equals_the_gguf_package():
    theirs = {int(kind): sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    ours = {int(kind): (f.elements, f.nbytes) for kind, f in BLOCK_FORMATS.items()}
    assert ours == {kind: theirs[kind] for kind in ours}
    assert [kind.name for kind in GGMLType] == [
        gguf.GGMLQuantizationType(int(kind)).name for kind in GGMLType
    ]
    assert set(BLOCK_FORMATS) == set(GGMLType)


def test_reads_what_the_gguf_package_writes(tmp_path):
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("a.u32", 4_000_000_000)
    writer.add_int64("a.i64", -(2**40))
    writer.add_float32("a.f32", 0.5)
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "grüße 你好")
    writer.add_array("a.strings", ["x", "", "äöü"])
    writer.add_array("a.ints", [1, -2, 3])
    writer.add_array("a.floats", [0.25, -1.5])
    weight = np.arange(12, dtype=np.float32).reshape(3, 4)
    writer.add_tensor("one.weight", weight)
    writer.add_tensor("two.weight", np.arange(5, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GGUFFile(path) as file:
        assert file.version == 3
        assert file.metadata["general.architecture"] == "llama"
        assert file.metadata["a.u32"] == 4_000_000_000
        assert file.metadata["a.i64"] == -(2**40)
        assert file.metadata["a.f32"] == 0.5
        assert file.metadata["a.f64"] == 0.1
        assert file.metadata["a.bool"] is True
        assert file.metadata["a.string"] == "grüße 你好"
        assert file.metadata["a.strings"] == ["x", "", "äöü"]
        assert file.metadata["a.ints"].tolist() == [1, -2, 3]
        assert file.metadata["a.floats"].tolist() == [0.25, -1.5]
        tensor = file.tensors["one.weight"]
        assert (tensor.shape, tensor.type_name, tensor.nbytes) == ((3, 4), "F32", 48)
        assert file.raw("one.weight").tobytes() == weight.tobytes()
        assert file.tensors["two.weight"].shape == (5,)
        assert file.raw("two.weight").view(np.float16).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.model
@pytest.mark.slow
def test_demo_model_equals_the_gguf_package():
    from cardan.core.weights.resolve import resolve_model

    path = resolve_model("demo").gguf
    theirs = gguf.GGUFReader(path)
    with GGUFFile(path) as file:
        assert list(file.tensors) == [tensor.name for tensor in theirs.tensors]
        for tensor in theirs.tensors:
            ours = file.tensors[tensor.name]
            assert ours.shape == tuple(int(n) for n in reversed(tensor.shape))
            assert (ours.type_id, ours.offset) == (int(tensor.tensor_type), tensor.data_offset)
            assert ours.nbytes == tensor.n_bytes
        keys = [key for key in theirs.fields if not key.startswith("GGUF.")]
        assert list(file.metadata) == keys
        for key in keys:
            value = file.metadata[key]
            value = value.tolist() if isinstance(value, np.ndarray) else value
            assert value == theirs.fields[key].contents(), key


def test_version_2_custom_alignment_and_nested_arrays(tmp_path):
    nested = (ARRAY, [(U8, [1, 2]), (STRING, ["a"])])
    data = gguf_bytes(
        [
            ("general.alignment", U32, 64),
            ("n", ARRAY, nested),
            ("flags", ARRAY, (BOOL, [True, False])),
            ("empty", ARRAY, (I32, [])),
        ],
        [f32_entry("a"), f32_entry("b", (2, 1), 64)],
        b"\1" * 16 + b"\0" * 48 + b"\2" * 8,
        version=2,
        align=64,
    )
    with GGUFFile(write(tmp_path, data)) as file:
        assert file.version == 2
        assert file.metadata["n"][0].tolist() == [1, 2]
        assert file.metadata["n"][1] == ["a"]
        assert file.metadata["flags"].tolist() == [True, False]
        assert file.metadata["empty"].size == 0
        assert file.raw("a").tolist() == [1] * 16
        assert file.raw("b").tolist() == [2] * 8
        assert file.tensors["b"].shape == (1, 2)


def test_views_outlive_the_file_and_never_write_to_it(tmp_path):
    path = write(tmp_path, gguf_bytes([], [f32_entry()], b"\7" * 16))
    before = path.read_bytes()
    file = GGUFFile(path)
    view = file.raw("t")
    file.close()
    file.close()
    view[:] = 0
    assert view.tolist() == [0] * 16
    assert path.read_bytes() == before
    with pytest.raises(WeightsError, match="is closed, tensor 't'"):
        file.raw("t")


def test_reading_is_enough_where_private_memory_is_refused(tmp_path, monkeypatch):
    real = mmap.mmap

    def strict(fileno, length, access):
        if access == mmap.ACCESS_COPY:
            raise OSError(12, "Cannot allocate memory")
        return real(fileno, length, access=access)

    monkeypatch.setattr("cardan.core.weights.gguf_file.mmap.mmap", strict)
    with GGUFFile(write(tmp_path, gguf_bytes([], [f32_entry()], b"\7" * 16))) as file:
        assert not file.raw("t").flags.writeable
        assert file.raw("t").tolist() == [7] * 16


def test_unknown_tensor_is_named(tmp_path):
    with (
        GGUFFile(write(tmp_path, gguf_bytes())) as file,
        pytest.raises(WeightsError, match="has no tensor 'nope'"),
    ):
        file.raw("nope")


def _raw_entry(key, type_id, body):
    """A file with one metadata entry of hand-made bytes."""
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
    return head + gguf_string(key) + struct.pack("<I", type_id) + body


HOSTILE = {
    "empty file": (b"", "is empty"),
    "not gguf": (b"\x80\x02pickle", "magic: .*not a GGUF file"),
    "lfs pointer": (b"version https://git-lfs.github.com/spec/v1", "Git LFS pointer"),
    "only magic": (b"GGUF", "version: needs 4 bytes"),
    "version 1": (gguf_bytes(version=1), "version: is 1"),
    "version 99": (gguf_bytes(version=99), "version: is 99"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big endian"),
    "huge tensor count": (gguf_bytes(num_tensors=2**63), "tensor count: says 9223372036854775808"),
    "huge metadata count": (gguf_bytes(num_entries=2**64 - 1), "metadata count: says"),
    "key past the end": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**62) + b"x" * 40,
        r"key of metadata entry 0 \(string length\)",
    ),
    "string past the end": (_raw_entry("k", STRING, struct.pack("<Q", 999)), "metadata 'k'"),
    "bad utf-8 key": (gguf_bytes([(b"\xff\xfe", U8, 1)]), "entry 0: is not valid UTF-8"),
    "bad utf-8 value": (gguf_bytes([("k", STRING, b"ab\xff")]), "'k': .*UTF-8 .*at byte 2"),
    "bad utf-8 item": (gguf_bytes([("k", ARRAY, (STRING, ["a", b"\xc3"]))]), r"'k'\[1\]: .*UTF-8"),
    "unknown value type": (_raw_entry("k", 13, b"\0" * 8), "'k': has unknown value type 13"),
    "unknown array type": (
        _raw_entry("k", ARRAY, struct.pack("<IQ", 77, 0)),
        "'k': has unknown value type 77",
    ),
    "bad bool": (_raw_entry("k", BOOL, b"\2"), "'k': has a boolean"),
    "bad bool array": (_raw_entry("k", ARRAY, struct.pack("<IQ", BOOL, 1) + b"\3"), "a boolean"),
    "huge number array": (
        _raw_entry("k", ARRAY, struct.pack("<IQ", F64, 2**61)),
        r"'k' \(array length\): says",
    ),
    "huge string array": (
        _raw_entry("k", ARRAY, struct.pack("<IQ", STRING, 2**60)),
        r"'k' \(array length\): says",
    ),
    "huge nested array": (
        _raw_entry("k", ARRAY, struct.pack("<IQ", ARRAY, 2**60)),
        r"'k' \(array length\): says",
    ),
    "string item past the end": (
        _raw_entry("k", ARRAY, struct.pack("<IQQ", STRING, 1, 5) + b"abc"),
        r"'k'\[0\]: the string runs past the end",
    ),
    "string length cut off": (
        _raw_entry("k", ARRAY, struct.pack("<IQQQ", STRING, 2, 4, 0) + b""),
        r"'k'\[1\]: the string runs past",
    ),
    "deep nesting": (
        _raw_entry("k", ARRAY, struct.pack("<IQ", ARRAY, 1) * 5000 + struct.pack("<IQ", U8, 0)),
        "'k': nests arrays deeper than 4",
    ),
    "duplicate key": (gguf_bytes([("k", U8, 1), ("k", U8, 2)]), "'k': appears twice"),
    "duplicate tensor": (
        gguf_bytes([], [f32_entry("t"), f32_entry("t", offset=32)], b"\0" * 64),
        "tensor 't': appears twice",
    ),
    "alignment 0": (gguf_bytes([("general.alignment", U32, 0)]), "alignment': is 0"),
    "alignment 33": (gguf_bytes([("general.alignment", U32, 33)]), "alignment': is 33"),
    "alignment huge": (gguf_bytes([("general.alignment", U32, 2**31)]), "not a power of two up to"),
    "alignment text": (gguf_bytes([("general.alignment", STRING, "32")]), "alignment': is '32'"),
    "five dimensions": (gguf_bytes([], [f32_entry(dims=(1,) * 5)]), "'t': has 5 dimensions"),
    "dimension count": (
        gguf_bytes([], [gguf_string("t") + struct.pack("<IIQ", 2**32 - 1, 0, 0) + b"\0" * 8]),
        "'t': has 4294967295 dimensions",
    ),
    "no dimension": (gguf_bytes([], [f32_entry(dims=())], b"\0" * 32), "'t': has 0 dimensions"),
    "empty dimension": (gguf_bytes([], [f32_entry(dims=(4, 0))]), "'t': has an empty dimension"),
    "overflowing shape": (
        gguf_bytes([], [f32_entry(dims=(2**63, 2**63, 2**63))], b"\0" * 64),
        "'t': spans bytes",
    ),
    "unknown tensor type": (
        gguf_bytes([], [tensor_entry("t", (32,), 4, 0)], b"\0" * 64),
        "'t': has unknown tensor type 4",
    ),
    "partial block": (
        gguf_bytes([], [tensor_entry("t", (33,), 2, 0)], b"\0" * 64),
        "'t': has rows of 33, not a multiple of the 32",
    ),
    "misaligned": (gguf_bytes([], [f32_entry(offset=4)], b"\0" * 64), "'t': starts at offset 4"),
    "offset past the end": (
        gguf_bytes([], [f32_entry(offset=2**63)], b"\0" * 64),
        "'t': spans bytes",
    ),
    "truncated data": (gguf_bytes([], [f32_entry(dims=(64,))], b"\0" * 255), "'t': .*truncated"),
    "overlap": (
        gguf_bytes([], [f32_entry("a", (16,)), f32_entry("b", offset=32)], b"\0" * 64),
        "tensor 'b': overlaps tensor 'a'",
    ),
    "same place": (
        gguf_bytes([], [f32_entry("a"), f32_entry("b")], b"\0" * 64),
        "overlaps tensor",
    ),
    "cut table": (gguf_bytes([], [f32_entry("t" * 40)])[:60], "tensor|count"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused_by_name(tmp_path, case):
    data, message = HOSTILE[case]
    with pytest.raises(WeightsError, match=message) as caught:
        GGUFFile(write(tmp_path, data))
    assert "model.gguf" in str(caught.value)


def test_missing_file_and_directory(tmp_path):
    with pytest.raises(WeightsError, match=r"none\.gguf: cannot be opened: No such file"):
        GGUFFile(tmp_path / "none.gguf")
    with pytest.raises(WeightsError, match="cannot be opened: Is a directory"):
        GGUFFile(tmp_path)


def _sample():
    return gguf_bytes(
        [
            ("general.architecture", STRING, "llama"),
            ("x", I64, -5),
            ("tokens", ARRAY, (STRING, ["a", "bc", "déf"])),
            ("scores", ARRAY, (F32, [1.0, 2.0])),
        ],
        [f32_entry("a"), tensor_entry("b", (32, 2), 2, 32)],
        b"\0" * 68,
    )


def test_every_truncation_is_refused(tmp_path):
    data = _sample()
    GGUFFile(write(tmp_path, data)).close()
    for size in range(len(data)):
        with pytest.raises(WeightsError):
            GGUFFile(write(tmp_path, data[:size]))


def test_random_damage_raises_nothing_else(tmp_path):
    rng = random.Random(0)
    data = _sample()
    for _ in range(1500):
        broken = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            broken[rng.randrange(len(broken))] = rng.choice([0, 1, 8, 9, 127, 255])
        try:
            GGUFFile(write(tmp_path, bytes(broken))).close()
        except WeightsError:
            continue
