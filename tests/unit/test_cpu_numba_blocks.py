"""What products with blocks by numba have alone: many rows, and factors as float32."""

import numpy as np
import pytest
import torch
from block_truth import FORMATS, activations, assert_close, decoded, edge_blocks, rounded, stored

from cardan.core.types.ggml import block_format
from cardan.platforms.cpu.numba.availability import missing_reason
from cardan.platforms.cpu.numba.codes import CODE_FORMATS, decode, take_apart

if missing_reason() is not None:
    pytest.skip(str(missing_reason()), allow_module_level=True)

from cardan.platforms.cpu.numba.blocks import block_linear, prepare_blocks


@pytest.mark.parametrize("format", FORMATS)
def test_no_rows_are_decoded(format):
    width = stored(format, 1, 768).shape[1]
    assert decode(np.empty((0, width), np.uint8), format).shape == (0, 768)


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


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
    truth = rounded(x, CODE_FORMATS[format].group) @ values.T
    room = 1e-6 * x.double().abs().sum(1, keepdim=True) * scale + 1e-30
    assert bool(((found - truth).abs() <= room).all())
