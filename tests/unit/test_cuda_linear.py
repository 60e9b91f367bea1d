"""Logits of few rows are Triton's, of many the library's, and neither is rounded on the way."""

import pytest
import torch
from triton_interpreter import interpreted, interpreting


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


@pytest.fixture
def linear_float32(monkeypatch):
    """The host's library has no results of another dtype than its operands'."""
    interpreted("linear")
    from cardan.platforms.cuda import linear

    def mm(x, weight, *, out_dtype):
        return torch.matmul(x.to(out_dtype), weight.to(out_dtype))

    monkeypatch.setattr(linear.torch, "mm", mm)
    return linear.linear_float32


@pytest.mark.parametrize("shape", [(1, 128), (5, 128), (2, 3, 128), (300, 128)])
def test_results_are_as_they_were_summed(linear_float32, shape):
    x, weight = drawn(*shape, seed=1), drawn(64, 128, seed=2)
    with interpreting():
        found = linear_float32(x, weight)
    truth = x.double() @ weight.double().t()
    assert found.dtype == torch.float32
    assert found.shape == truth.shape
    torch.testing.assert_close(found.double(), truth, atol=1e-4, rtol=1e-5)
