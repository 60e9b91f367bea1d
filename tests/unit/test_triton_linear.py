"""Products of few rows under the interpreter against float64, and when launches overlap."""

import itertools

import pytest
import torch
from triton_interpreter import interpreted, interpreting

from cardan.platforms.shared.triton.linear_tuning import RowTuning, SkinnyTuning, skinny_tuning

# Outputs and inputs of layers of Qwen3-0.6B, Llama-3.1-8B and Qwen3-30B-A3B.
LAYERS = [
    *[(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024)],
    *[(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)],
    *[(5120, 2048), (2048, 4096)],
]


def drawn(*shape, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(torch.bfloat16)


def check(multiply, num_rows, outputs, inputs, bias, tuning, result_dtype=torch.bfloat16):
    wide = drawn(num_rows, inputs + 16, seed=1)
    x = wide[:, :inputs]
    weight = drawn(outputs, inputs, seed=2, scale=inputs**-0.5)
    bias = drawn(outputs, seed=3) if bias else None
    with interpreting():
        found = multiply(x, weight, bias, tuning, result_dtype)
    truth = x.double() @ weight.double().T
    if bias is not None:
        truth += bias.double()
    assert found.shape == truth.shape
    assert found.dtype == result_dtype
    # Only what is stored is rounded.
    limit = 2e-2 if result_dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found.double(), truth, atol=limit, rtol=limit / 2)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("num_rows", "outputs", "inputs", "tuning"),
    [
        (5, 100, 256, SkinnyTuning(64, 64, 2, 4, 3)),  # outputs past the last
        (2, 64, 300, SkinnyTuning(32, 64, 3, 4, 3)),  # shares and blocks that are not whole
        (17, 40, 50, SkinnyTuning(16, 64, 1, 4, 3)),  # a single block that is not whole
        (33, 64, 256, SkinnyTuning(64, 64, 1, 4, 3)),
    ],
)
def test_product_of_few_rows(num_rows, outputs, inputs, tuning, bias):
    check(interpreted("linear").multiply_rows, num_rows, outputs, inputs, bias, tuning)


@pytest.mark.parametrize("block", [64, 128, 512])
def test_product_of_one_row_in_any_tile(block):
    tuning = RowTuning(outputs=8, block=block, num_warps=4)
    check(interpreted("linear").multiply_row, 1, 21, 300, True, tuning)


@pytest.mark.parametrize("shares", [1, 3])
def test_results_may_stay_as_they_were_summed(shares):
    tuning = SkinnyTuning(32, 64, shares, 4, 3)
    multiply = interpreted("linear").multiply_rows
    check(multiply, 3, 40, 256, False, tuning, torch.float32)
    row = RowTuning(outputs=8, block=128, num_warps=4)
    check(interpreted("linear").multiply_row, 1, 21, 300, False, row, torch.float32)


def test_shares_cover_the_inputs():
    """Each share has some, and all but the last whole blocks."""
    for shares, inputs in itertools.product((1, 2, 3, 4, 7, 16), (64, 1024, 3072, 4096, 14336)):
        tuning = SkinnyTuning(64, 128, shares, 4, 4)
        share = tuning.share(inputs)
        assert share == inputs or share % tuning.block == 0
        assert -(-inputs // share) <= shares


def test_sizes_of_layers():
    for (outputs, inputs), num_rows in itertools.product(LAYERS, (2, 8, 16, 32, 64)):
        tuning = skinny_tuning(num_rows, outputs, inputs)
        if tuning is not None:
            assert tuning.share(inputs) >= tuning.block
    assert skinny_tuning(4, 4096, 4100) is None
    assert skinny_tuning(4, 8, 4096) is None
    assert skinny_tuning(4, 128, 2048) is not None
    assert skinny_tuning(1000, 4096, 4096) is None


def test_other_sizes_are_the_librarys():
    """On the host nothing overlaps, and no row is given to a kernel but a single one."""
    linear = interpreted("linear").linear
    for shape in ((4, 1024), (2, 3, 64), (0, 64), (3, 0)):
        x = drawn(*shape, seed=1)
        weight = drawn(32, shape[-1], seed=2)
        assert torch.equal(linear(x, weight, None), torch.nn.functional.linear(x, weight))


@pytest.mark.parametrize("shape", [(2, 32), (128,)])
def test_what_does_not_fit_together_is_refused(shape):
    """Also where it has as many elements as one row, or as two."""
    with pytest.raises(RuntimeError, match="shape"):
        interpreted("linear").linear(drawn(*shape, seed=1), drawn(32, 64, seed=2), None)


def test_who_overlaps(monkeypatch):
    module = interpreted("dependent_launch")
    x = torch.zeros(1)
    assert module.dependent(x, 1) == {"OVERLAPS": False}
    assert module.are_fixed(x) == 0
    monkeypatch.setattr(module, "can_overlap", lambda device: True)
    assert module.dependent(x, 1) == {"OVERLAPS": True, "launch_pdl": True}
    assert module.dependent(x, module.MOST_ROWS + 1) == {"OVERLAPS": False}
