"""Triton's kernels under the interpreter against the float64 definitions."""

import pytest
import torch
from triton_interpreter import interpreted, interpreting

from cardan.core.interfaces.kernels import Case, check_needs
from cardan.core.ops.catalogue import CATALOGUE
from cardan.core.ops.compare import compare_case
from cardan.platforms.shared.triton.providers import TRITON_PROVIDERS

OPS = {op.name: op for op in CATALOGUE}
HOST = torch.device("cpu")


def kernel_of(name):
    provider = next(item for item in TRITON_PROVIDERS if item.op == name)
    module, _, function = provider.load.partition(":")
    return getattr(interpreted(module.rpartition(".")[2]), function)


def check(name, dtype, *args):
    with interpreting(), torch.inference_mode():
        found = compare_case(
            OPS[name], kernel_of(name), Case(args, {}), OPS, OPS[name].tolerances[dtype]
        )
    assert found.ok, f"{name} {dtype}: {found}"


def normal(*shape, seed=0, scale=1.0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("provider", TRITON_PROVIDERS, ids=lambda item: item.op)
def test_agrees_with_definition(provider, dtype):
    if dtype not in provider.needs.dtypes:
        pytest.skip(f"{provider.name} takes no {dtype}")
    for case in OPS[provider.op].make_inputs(getattr(torch, dtype), HOST, 3):
        check(provider.op, dtype, *case.args)


def test_promises():
    """Few rows have products of their own; the search counts in ten bits."""
    traits = {provider.op: provider.traits for provider in TRITON_PROVIDERS}
    varying = {op for op, words in traits.items() if "batch_invariant" not in words}
    assert varying == {"linear", "linear_float32", "expert_mlp"}
    choose = next(item for item in TRITON_PROVIDERS if item.op == "choose_tokens")
    assert check_needs(choose.needs, (), {"dtype": "float32", "vocab_size": 262208})
    assert not check_needs(choose.needs, (), {"dtype": "float32", "vocab_size": 1 << 23})


def test_providers_are_of_this_version():
    versions = {provider.op: provider.version for provider in TRITON_PROVIDERS}
    assert versions == {name: OPS[name].version for name in versions}


@pytest.mark.parametrize("outputs", [1, 2, 7, 64])
@pytest.mark.parametrize("inputs", [1, 100, 1024, 1500])
def test_product_of_one_row(outputs, inputs):
    x = normal(1, inputs, dtype=torch.bfloat16)
    weight = normal(outputs, inputs, seed=1, scale=inputs**-0.5, dtype=torch.bfloat16)
    bias = normal(outputs, seed=2, dtype=torch.bfloat16) if inputs == 100 else None
    check("linear", "bfloat16", x, weight, bias)


def test_product_of_one_row_of_a_wider_tensor():
    """Weights and activations may be parts of others."""
    wide = normal(6, 300, dtype=torch.bfloat16)
    x = normal(2, 100, seed=1, dtype=torch.bfloat16)[1:]
    check("linear", "bfloat16", x, wide[:, 100:200], None)


def test_norm_of_heads_in_a_wider_tensor():
    """Heads are parts of a fused projection: [T, heads, D] with gaps between tokens."""
    wide = normal(3, 9, 24, scale=3.0)
    check("rms_norm", "float32", wide[:, 2:5], normal(24, seed=1), 1e-6)


def test_rotation_of_heads_in_a_wider_tensor():
    wide = normal(4, 8, 16)
    angles = normal(10, 8, seed=1)
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions = torch.tensor([9, 0, 3, 3])
    args = (wide[:, :5], wide[:, 5:7])
    check("rotary_embedding", "float32", *args, table, positions)
    wider = torch.cat((table, angles), dim=1)[:, :16]
    check("rotary_embedding", "float32", *args, wider, positions)
    weights = (normal(16, seed=2), normal(16, seed=3))
    check("qk_norm_rope", "float32", *args, *weights, 1e-6, table, positions)


@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_tanh_and_mul"])
def test_gates_longer_than_a_program(name):
    check(name, "float32", normal(2, 2 * 1500, scale=4.0))


def test_no_rows():
    with interpreting():
        assert kernel_of("rms_norm")(torch.zeros(0, 8), torch.ones(8), 1e-6).shape == (0, 8)
        assert kernel_of("silu_and_mul")(torch.zeros(0, 8)).shape == (0, 4)
        assert kernel_of("greedy_tokens")(torch.zeros(0, 8)).shape == (0,)


def test_greedy_over_several_chunks():
    """The lowest id wins a tie, across chunks too; zeros of both signs tie; NaN is largest."""
    logits = normal(4, 20000)
    logits[0, [19999, 9000, 150]] = 50.0
    logits[1] = -1.0
    logits[1, [17, 18000]] = torch.tensor([-0.0, 0.0])
    logits[2, 12345] = torch.nan
    logits[3] = -torch.inf
    with interpreting():
        assert kernel_of("greedy_tokens")(logits).tolist() == [150, 17, 12345, 0]


def test_ties_at_the_cut():
    """Top-k keeps all tokens that tie for place k; top-p keeps the lowest ids of those that tie."""
    logits = torch.zeros(1, 300)
    logits[0, [40, 80, 120, 160]] = torch.tensor([3.0, 2.0, 2.0, 2.0])
    for uniform in (0.1, 0.55, 0.75, 0.95):
        draw = torch.tensor([uniform], dtype=torch.float64)
        top_k = torch.tensor([2])
        check("choose_tokens", "float32", logits, None, draw, None, top_k, ones(1.0))
        # Of weights e, 1, 1, 1: the share is reached with the second tie.
        check("choose_tokens", "float32", logits, None, draw, None, top_k, ones(0.75))


def ones(top_p):
    return torch.tensor([[top_p], [0.0]], dtype=torch.float64)


def test_draws_follow_the_distribution():
    """Even numbers give tokens in proportion to their probabilities."""
    logits = normal(1, 50, scale=2.0).expand(80, 50).contiguous()
    uniform = (torch.arange(80, dtype=torch.float64) + 0.5) / 80
    with interpreting():
        tokens, failed = kernel_of("choose_tokens")(logits, None, uniform, None, None, None)
    shares = torch.bincount(tokens, minlength=50) / 80
    assert not failed.any()
    assert (shares - logits[0].softmax(-1)).abs().max() <= 1 / 80 + 1e-6


@pytest.mark.parametrize("flat", [False, True])
def test_candidates_of_a_long_vocabulary(flat):
    """Top-k among the candidates of many chunks, and, where too many logits are alike for that,
    among all; drawn ids are those of the whole vocabulary."""
    logits = normal(2, 9000, seed=4)
    if flat:
        logits = (logits * 0.5).round()
    top_k = torch.tensor([5, 7])
    shares = torch.tensor([[1.0, 0.8], [0.0, 0.01]], dtype=torch.float64)
    for uniform in (0.0517, 0.5031, 0.9333):
        draw = torch.tensor([uniform, 1 - uniform], dtype=torch.float64)
        check("choose_tokens", "float32", logits, None, draw, None, top_k, shares)
