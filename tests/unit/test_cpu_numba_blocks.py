"""Products with blocks by numba against the gguf package's decoding and float64."""

import gguf
import numpy as np
import pytest
import torch

from cardan.core.ops.reference.block_inputs import random_blocks
from cardan.core.types.ggml import BLOCK_TYPES, block_format
from cardan.platforms.cpu.numba.availability import missing_reason
from cardan.platforms.cpu.numba.codes import CODE_FORMATS, decode, take_apart

if missing_reason() is not None:
    pytest.skip(str(missing_reason()), allow_module_level=True)

from cardan.platforms.cpu.numba.blocks import block_embedding, block_linear, prepare_blocks

FORMATS = tuple(BLOCK_TYPES)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def decoded(weight, format):
    """The gguf package's values of stored rows, float32."""
    kind = getattr(gguf.GGMLQuantizationType, format.upper())
    return torch.from_numpy(gguf.dequantize(weight.numpy(), kind)).view(weight.shape[0], -1)


def stored(format, outputs, inputs, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return random_blocks(format, outputs, inputs, inputs**-0.5, generator)


def activations(rows, inputs, dtype=torch.float32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    # Groups of very different sizes, and one of zeros.
    x = torch.randn(rows, inputs, generator=generator)
    sizes = torch.randint(-3, 3, (rows, inputs // 32), generator=generator)
    x = x * torch.exp2(sizes).repeat_interleave(32, 1)
    x[:, :32] *= torch.arange(rows).fmod(2).unsqueeze(1)
    return x.to(dtype)


def rounded(x, format):
    """x as the kernels see few rows of it, in float64: 8 bits and a factor for each group."""
    groups = x.float().reshape(x.shape[0], -1, CODE_FORMATS[format].group)
    most = groups.abs().amax(-1, keepdim=True)
    inverse = torch.where(most > 2.0**-100, torch.tensor(127.0) / most, 0.0)
    return ((groups * inverse).round().double() * (most / 127).double()).view(x.shape)


def assert_close(found, x, weight, bias=None, rounding=0.0):
    """Within 1e-5 of the sum of magnitudes, and the rounding of the result's dtype."""
    truth = x.double() @ weight.double().T
    scale = x.double().abs() @ weight.double().abs().T
    if bias is not None:
        truth, scale = truth + bias.double(), scale + bias.double().abs()
    excess = (found.double() - truth).abs() - rounding * truth.abs()
    assert bool((excess <= 1e-5 * scale + 1e-30).all()), float((excess / scale).max())


def edge_blocks(format):
    """Rows of one block each: all bits of codes and scales clear or set, with the largest finite,
    subnormal, zero and negative factors."""
    size = block_format(format).nbytes
    halves = np.array([65504, -65504, 6e-8, -6e-8, 0.0, -0.0, 1.5, -3e-5], np.float16)
    rows = []
    for half in halves.view(np.uint16):
        for fill in (0x00, 0xFF, 0x80, 0x7F):
            row = np.full(size, fill, np.uint8)
            for at in {"q2_k": (80, 82), "q3_k": (108,), "q6_k": (208,)}.get(format, (0, 2)):
                if at == 0 or format not in ("q4_0", "q5_0", "q8_0", "iq4_nl"):
                    row[at : at + 2] = [half & 255, half >> 8]
            rows.append(row)
    return torch.from_numpy(np.stack(rows))


@pytest.mark.parametrize("format", FORMATS)
def test_decoding_is_the_definitions(format):
    weight = stored(format, 29, 768)
    ids = torch.tensor([28, 0, 3, 3, 17])
    for table in (weight, edge_blocks(format)):
        chosen = ids % table.shape[0]
        truth = decoded(table, format)[chosen]
        for dtype in DTYPES:
            assert torch.equal(block_embedding(chosen, table, format, dtype), truth.to(dtype))
    wide = torch.zeros(29, weight.shape[1] + 6, dtype=torch.uint8)
    wide[:, 3:-3] = weight
    found = block_embedding(ids.view(5, 1), wide[:, 3:-3], format, torch.float32)
    assert torch.equal(found, decoded(weight, format)[ids].view(5, 1, -1))
    assert decode(np.empty((0, weight.shape[1]), np.uint8), format).shape == (0, 768)


@pytest.mark.parametrize("format", FORMATS)
def test_few_rows_are_products_of_rounded_activations(format):
    """Ragged sizes: tiles that are not full, one group, several."""
    unit = block_format(format).elements
    sizes = ((1, 1, 1), (2, 7, 3), (3, 64, 17), (4, 65, 2), (5, 129, 5), (7, 300, 1))
    for seed, (rows, outputs, units) in enumerate(sizes):
        inputs = unit * (units if unit == 32 else (units + 3) // 4)
        weight = stored(format, outputs, inputs, seed)
        x = activations(rows, inputs, seed=seed)
        bias = torch.randn(outputs, generator=torch.Generator().manual_seed(seed))
        packed = prepare_blocks(weight, format, inputs, outputs)
        values = decoded(weight, format)
        for used in (None, bias):
            assert_close(block_linear(x, packed, used, format), rounded(x, format), values, used)


@pytest.mark.parametrize("format", FORMATS)
def test_many_rows_are_products_of_activations_as_they_are(format):
    for outputs, inputs in ((33, 256), (700, 1280)):
        weight = stored(format, outputs, inputs)
        packed = prepare_blocks(weight, format, inputs, outputs)
        x, bias = activations(67, inputs), torch.linspace(-2, 2, outputs)
        assert_close(block_linear(x, packed, bias, format), x, decoded(weight, format), bias)


def test_wide_layers_are_decoded_in_several_parts():
    weight = stored("q4_0", 300, 16384)
    packed = prepare_blocks(weight, "q4_0", 16384, 300)
    x = activations(9, 16384)
    assert_close(block_linear(x, packed, None, "q4_0"), x, decoded(weight, "q4_0"))


@pytest.mark.parametrize("format", FORMATS)
def test_edge_blocks_multiply_as_they_decode(format):
    weight = edge_blocks(format)
    inputs = block_format(format).elements
    x = activations(3, inputs)
    packed = prepare_blocks(weight, format, inputs, weight.shape[0])
    values = decoded(weight, format).double()
    # Codes start at 0 and what they were moved by is taken away as float32: the largest counts.
    _, scales, minima = take_apart(weight.numpy(), format)
    scale = torch.from_numpy(np.abs(scales).max(1) * 256 + np.abs(minima).max(1)).double()
    found = block_linear(x, packed, None, format).double()
    truth = rounded(x, format) @ values.T
    room = 1e-6 * x.double().abs().sum(1, keepdim=True) * scale + 1e-30
    assert bool(((found - truth).abs() <= room).all())


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("rows", [5, 9])
def test_short_types_are_rounded_once(dtype, rows):
    weight = stored("q4_1", 50, 576)
    x = activations(rows, 576, dtype)
    bias = torch.linspace(-2, 2, 50).to(dtype)
    packed = prepare_blocks(weight, "q4_1", 576, 50)
    found = block_linear(x, packed, bias, "q4_1")
    assert found.dtype is dtype
    seen = rounded(x, "q4_1") if rows < 8 else x
    assert_close(found, seen, decoded(weight, "q4_1"), bias, rounding=2.0**-8)


def test_shapes_strides_and_threads():
    weight = stored("q4_0", 130, 64)
    x, bias = activations(6, 64), torch.arange(130.0)
    packed = prepare_blocks(weight, "q4_0", 64, 130)

    def linear(x):
        return block_linear(x, packed, bias, "q4_0")

    whole = linear(x)
    assert torch.equal(linear(x.view(3, 1, 2, 64)), whole.view(3, 1, 2, 130))
    assert torch.equal(linear(x[5]), whole[5])
    wide = torch.zeros(6, 100)
    wide[:, 31:95] = x
    assert torch.equal(linear(wide[:, 31:95]), whole)
    assert torch.equal(linear(x.t().contiguous().t()), whole)
    assert linear(x[:0]).shape == (0, 130)
    torch.set_num_threads(1)
    assert torch.equal(linear(x), whole)
    torch.set_num_threads(5)
    assert torch.equal(linear(x), whole)
    apart = torch.zeros(130, weight.shape[1] + 18, dtype=torch.uint8)
    apart[:, 18:] = weight
    again = prepare_blocks(apart[:, 18:], "q4_0", 64, 130)
    assert torch.equal(again.words, packed.words)


@pytest.mark.parametrize("format", ["q4_1", "q8_0", "q6_k"])
@pytest.mark.parametrize("rows", [6, 10])
def test_what_is_not_finite_stays_in_its_row(format, rows):
    weight = stored(format, 20, 512)
    packed = prepare_blocks(weight, format, 512, 20)
    x = activations(rows, 512)
    truth = block_linear(x, packed, None, format)
    x[1, 511], x[3, 40], x[4, 0] = torch.nan, torch.inf, -torch.inf
    found = block_linear(x, packed, None, format)
    for row in range(rows):
        if row in (1, 3, 4):
            assert not found[row].isfinite().any()
        else:
            assert torch.equal(found[row], truth[row])


def test_tiny_activations_count_as_zero():
    weight = stored("q8_0", 9, 64)
    packed = prepare_blocks(weight, "q8_0", 64, 9)
    x = torch.full((2, 64), 1e-42)
    x[1, 32:] = 1.0
    found = block_linear(x, packed, None, "q8_0")
    assert torch.equal(found[0], torch.zeros(9))
    assert_close(found[1:], rounded(x[1:], "q8_0"), decoded(weight, "q8_0"))
    x[1, :32] = 1e36
    assert block_linear(x, packed, None, "q8_0").isfinite().all()


def test_bad_input_is_named():
    weight = stored("q4_0", 9, 64)
    packed = prepare_blocks(weight, "q4_0", 64, 9)
    with pytest.raises(ValueError, match=r"x must be .* \(\.\.\., 64\) on the host, got"):
        block_linear(torch.zeros(2, 32), packed, None, "q4_0")
    with pytest.raises(ValueError, match="no kernels for format 'q9_9'; known: q4_0"):
        prepare_blocks(weight, "q9_9", 64, 9)
    with pytest.raises(ValueError, match="weight has 9 rows, out_features is 8"):
        prepare_blocks(weight, "q4_0", 64, 8)
    with pytest.raises(ValueError, match="rows of 36 bytes are not in_features=32 in q4_0"):
        prepare_blocks(weight, "q4_0", 32, 9)
    with pytest.raises(ValueError, match="weight must be a uint8 matrix on the host"):
        prepare_blocks(weight.float(), "q4_0", 64, 9)
