"""Norms, rotation and the gated activation by numba against float64, and their refusals."""

import numpy as np
import pytest
import torch

from cardan.core.ops.catalogue import CATALOGUE
from cardan.core.ops.registry import KernelRegistry
from cardan.platforms.cpu.numba.availability import missing_reason
from cardan.platforms.cpu.numba.providers import NUMBA_PROVIDERS

if missing_reason() is not None:
    pytest.skip(str(missing_reason()), allow_module_level=True)

from cardan.platforms.cpu.numba.arithmetic import exponential, widen_half
from cardan.platforms.cpu.numba.elementwise import (
    fused_add_rms_norm,
    rms_norm,
    rotary_embedding,
    silu_and_mul,
)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(found, truth):
    assert found.dtype is torch.float32
    assert torch.allclose(found.double(), truth, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_providers_pass_the_registrys_check(dtype):
    found = KernelRegistry(
        CATALOGUE, NUMBA_PROVIDERS, device=torch.device("cpu"), features=(), strict=True
    )
    served = {row.op: row for row in found.table(dtype) if row.provider.startswith("cpu.numba_")}
    blocks = {"block_linear", "block_embedding"}
    assert set(served) == ({item.op for item in NUMBA_PROVIDERS} if dtype == "float32" else blocks)
    assert all(row.self_check.startswith("passed") for row in served.values())


# Fewer elements than are given to torch, and more.
@pytest.mark.parametrize("rows", [0, 1, 3, 40])
def test_norms(rows):
    x, residual, weight = normal(rows, 577), normal(rows, 577, seed=1) * 30, normal(577, seed=2)

    def truth(x):
        x = x.double()
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()

    close(rms_norm(x, weight, 1e-5), truth(x))
    wide = torch.cat((residual, x), dim=1)
    close(rms_norm(wide[:, 577:], weight, 1e-5), truth(x))
    normed, total = fused_add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    close(normed, truth(x + residual))
    with pytest.raises(ValueError, match=r"residual must be as x"):
        fused_add_rms_norm(x, residual[:, :5], weight, 1e-5)
    with pytest.raises(ValueError, match=r"x must be float32 on the host, got torch\.float64"):
        rms_norm(normal(2, 8).double(), weight[:8], 1e-5)


@pytest.mark.parametrize("tokens", [0, 1, 5, 90])
@pytest.mark.parametrize("rotary", [64, 20])
def test_rotation(tokens, rotary):
    fused = normal(tokens, 5, 64)
    q, k = fused.split([3, 2], dim=1)
    angles = normal(100, rotary // 2).double()
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1).float()
    positions = torch.arange(tokens).flip(0) + 3
    found = rotary_embedding(q, k, cos_sin, positions)
    half = rotary // 2
    cos, sin = cos_sin[positions].double().unsqueeze(1).chunk(2, dim=-1)
    for given, got in zip((q, k), found, strict=True):
        first, second, rest = given.double().split([half, half, 64 - rotary], dim=-1)
        truth = torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
        close(got, truth)


def test_rotation_refuses_what_does_not_fit():
    q, k, table = normal(2, 3, 8), normal(2, 1, 8), normal(4, 8)
    for wrong in (-1, 4):
        with pytest.raises(IndexError, match=r"positions must lie in \[0, 4\)"):
            rotary_embedding(q, k, table, torch.tensor([0, wrong]))
    with pytest.raises(ValueError, match="must agree in tokens and head dim"):
        rotary_embedding(q, k, table, torch.tensor([0]))
    with pytest.raises(ValueError, match="positions must be int64"):
        rotary_embedding(q, k, table, torch.tensor([0, 1], dtype=torch.int32))


@pytest.mark.parametrize("rows", [0, 1, 3, 60])
def test_gate(rows):
    x = normal(rows, 302) * 20
    gate, up = x.double().chunk(2, dim=-1)
    close(silu_and_mul(x) / 40, torch.nn.functional.silu(gate) * up / 40)
    with pytest.raises(ValueError, match="even; got 3"):
        silu_and_mul(normal(1, 3))


def test_gates_of_extreme_numbers():
    gates = [0.0, -0.0, 200.0, -200.0, 1e30, -1e30, torch.nan, 1e-40]
    x = torch.tensor([[*gates, *[1.0] * 8]])
    found = silu_and_mul(x)[0]
    want = [0.0, 0.0, 200.0, 0.0, 1e30, 0.0]
    assert found[:6].tolist() == pytest.approx(want, rel=1e-6, abs=1e-8)
    assert found[6].isnan()


def test_exponential_is_that_of_float64():
    points = np.concatenate((np.linspace(-87, 88, 4001), [0.0, 1e-30, -1e-30])).astype(np.float32)
    found = np.array([exponential(x) for x in points], np.float64)
    truth = np.exp(points.astype(np.float64))
    assert np.max(np.abs(found / truth - 1)) < 3e-7
    assert exponential(np.float32(-np.inf)) == 0
    assert exponential(np.float32(-90)) == 0
    assert np.isnan(exponential(np.float32(np.nan)))


def test_every_half_is_widened():
    halves = np.arange(1 << 16, dtype=np.uint16)
    out = np.empty(len(halves), np.float32)
    widen_half(halves, out)
    truth = halves.view(np.float16).astype(np.float32)
    assert np.array_equal(out, truth, equal_nan=True)
    assert np.array_equal(np.signbit(out[~np.isnan(out)]), np.signbit(truth[~np.isnan(truth)]))
