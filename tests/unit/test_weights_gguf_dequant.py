"""Decoding of every GGML type against the `gguf` package."""

import sys

import gguf
import numpy as np
import pytest
import torch

from cardan.core.interfaces.errors import WeightsError
from cardan.core.ops.reference.block_decoders import DECODERS
from cardan.core.types.ggml import BLOCK_FORMATS, GGMLType
from cardan.core.weights.gguf_dequant import PLAIN_DTYPES, dequantize

BY_PACKAGE = sorted(set(GGMLType) - set(DECODERS) - set(PLAIN_DTYPES))
NOWHERE = (GGMLType.Q8_1, GGMLType.Q8_K, GGMLType.Q1_0)


def random_blocks(kind, rows, row_blocks):
    """Random bytes; every bit pattern of every field may occur, infinite scales included."""
    rng = np.random.default_rng(int(kind))
    nbytes = BLOCK_FORMATS[kind].nbytes
    return rng.integers(0, 256, rows * row_blocks * nbytes, dtype=np.uint8)


def oracle(raw, kind, shape):
    with np.errstate(all="ignore"):
        values = gguf.quants.dequantize(
            raw.reshape(shape[0], -1), gguf.GGMLQuantizationType(int(kind))
        )
    return values.reshape(shape).astype(np.float32)


def assert_bits_equal(got, expected):
    nan = np.isnan(expected)
    assert np.array_equal(np.isnan(got), nan)
    assert np.array_equal(got[~nan].view(np.uint32), expected[~nan].view(np.uint32))


@pytest.mark.parametrize("kind", [*DECODERS, *(k for k in BY_PACKAGE if k not in NOWHERE)])
def test_bit_equal_to_the_gguf_package(kind):
    elements = BLOCK_FORMATS[kind].elements
    shape = (37, 3 * elements)
    raw = random_blocks(kind, 37, 3)
    got = dequantize(raw, int(kind), shape, torch.float32)
    assert got.dtype == torch.float32
    assert tuple(got.shape) == shape
    assert_bits_equal(got.numpy(), oracle(raw, kind, shape))


@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_round_once_and_chunks_join(kind, dtype):
    elements = BLOCK_FORMATS[kind].elements
    rows = 200_000 // elements  # several chunks, the last one partial
    raw = random_blocks(kind, rows, 1)
    expected = torch.from_numpy(oracle(raw, kind, (rows, elements))).to(dtype)
    got = dequantize(raw, int(kind), (rows, elements), dtype)
    assert got.dtype == dtype
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", PLAIN_DTYPES)
def test_plain_types(kind):
    values = np.arange(-12, 12).reshape(2, 3, 4)
    stored = torch.from_numpy(values).to(PLAIN_DTYPES[kind])
    raw = stored.view(torch.uint8).numpy().reshape(-1)
    got = dequantize(raw, int(kind), (2, 3, 4), torch.float32)
    assert np.array_equal(got.numpy(), values)


def test_plain_type_is_a_view_where_nothing_changes():
    raw = np.zeros(16, np.uint8)
    got = dequantize(raw, int(GGMLType.F32), (4,), torch.float32)
    assert got.data_ptr() == raw.ctypes.data


def test_read_only_and_misaligned_bytes_are_copied():
    raw = np.frombuffer(b"\0" + np.arange(4, dtype=np.float32).tobytes(), np.uint8)[1:]
    got = dequantize(raw, int(GGMLType.F32), (4,), torch.float32)
    assert got.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", NOWHERE)
def test_types_that_nobody_decodes(kind):
    elements = BLOCK_FORMATS[kind].elements
    with pytest.raises(WeightsError, match=f"type {kind.name} is decoded neither"):
        dequantize(random_blocks(kind, 1, 1), int(kind), (elements,), torch.float32)


def test_missing_gguf_package_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf.quants", None)
    raw = random_blocks(GGMLType.IQ4_XS, 1, 1)
    with pytest.raises(WeightsError, match=r"IQ4_XS.*pip install cardan\[gguf\]"):
        dequantize(raw, int(GGMLType.IQ4_XS), (256,), torch.float32)


def test_bad_arguments_are_named():
    raw = np.zeros(18, np.uint8)
    with pytest.raises(WeightsError, match="unknown GGML tensor type 4"):
        dequantize(raw, 4, (32,), torch.float32)
    with pytest.raises(WeightsError, match=r"18 bytes of type Q4_0 .* shape \(64,\)"):
        dequantize(raw, int(GGMLType.Q4_0), (64,), torch.float32)
    with pytest.raises(WeightsError, match=r"shape \(2, 16\)"):
        dequantize(raw, int(GGMLType.Q4_0), (2, 16), torch.float32)
    with pytest.raises(WeightsError, match=r"torch.int8 is not a floating type"):
        dequantize(raw, int(GGMLType.Q4_0), (32,), torch.int8)
