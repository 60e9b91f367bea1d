"""Weights quantised while they load: bytes and errors against the ``gguf`` package and NumPy."""

import gguf
import numpy as np
import pytest
import torch

from cardan.plugins.quantization.quantizers import quantize_int8, quantize_q4_1, quantize_q8_0

KINDS = {"q8_0": gguf.GGMLQuantizationType.Q8_0, "q4_1": gguf.GGMLQuantizationType.Q4_1}


def weights(rows=150, columns=576, seed=0):
    """Rows of different spreads, zeros, constants, tiny numbers, outliers; several chunks."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(rows, columns, generator=generator)
    made *= torch.rand(rows, 1, generator=generator) + 0.01
    made[3] = 0.0
    made[4, :32] = 0.3
    made[5, :32] = 1e-7
    made[6, 7] = 40.0
    made[7, :32] = torch.linspace(-1, 1, 32)
    made[8, :32] = torch.linspace(3, 4, 32)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_q8_0_has_the_bytes_of_the_gguf_package(dtype):
    weight = weights().to(dtype)
    expected = gguf.quants.quantize(weight.float().numpy(), KINDS["q8_0"])
    assert np.array_equal(quantize_q8_0(weight).numpy(), expected)


def test_q8_0_rounds_ties_as_ggml_does():
    # Halves of a factor of 1, and the largest number below a half.
    row = torch.arange(-16, 16, dtype=torch.float32) + 0.5
    row[0], row[1] = 127.0, 0.49999997
    expected = gguf.quants.quantize(row[None].numpy(), KINDS["q8_0"])
    assert np.array_equal(quantize_q8_0(row[None]).numpy(), expected)


def test_q4_1_is_nearer_than_plain_rounding():
    weight = weights()
    plain = gguf.quants.quantize(weight.numpy(), KINDS["q4_1"])
    found = quantize_q4_1(weight).numpy()
    assert found.shape == plain.shape
    errors = [
        np.square(gguf.quants.dequantize(data, KINDS["q4_1"]) - weight.numpy())
        .reshape(-1, 32)
        .sum(axis=1)
        for data in (found, plain)
    ]
    assert np.isfinite(errors).all()
    ordinary = slice(9 * 18, None)
    assert errors[0][ordinary].mean() < 0.88 * errors[1][ordinary].mean()
    # No block is much worse; equal numbers and zeros are exact up to float16.
    assert (errors[0] <= 1.02 * errors[1] + 1e-12).mean() > 0.98
    assert errors[0][3 * 18 : 4 * 18].max() == 0.0
    assert errors[0][4 * 18] < 32 * (0.3 * 2**-11) ** 2


def test_views_and_parts_give_the_same_bytes():
    weight = weights(40, 128)
    for quantize in (quantize_q8_0, quantize_q4_1):
        whole = quantize(weight)
        assert torch.equal(quantize(weight[7:20]), whole[7:20])
        wide = torch.zeros(40, 256)
        wide[:, 64:192] = weight
        assert torch.equal(quantize(wide[:, 64:192]), whole)
        assert quantize(weight[:0]).shape == (0, whole.shape[1])


def test_int8_rows():
    weight = weights(77, 50)
    numbers, scales = quantize_int8(weight)
    values = weight.numpy()
    expected = np.abs(values).max(axis=1) / np.float32(127)
    assert numbers.dtype == torch.int8
    assert scales.dtype == torch.float32
    assert np.array_equal(scales.numpy(), expected)
    error = np.abs(numbers.numpy() * scales.numpy()[:, None] - values)
    assert (error <= 0.5001 * expected[:, None]).all()
    assert numbers[3].count_nonzero() == 0
