"""Providers of AITER over a made-up module whose functions have the package's own signatures."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import numpy as np
import pytest
import torch

from cardan.core.interfaces.kernels import REFERENCE, check_needs
from cardan.core.ops.catalogue import CATALOGUE
from cardan.core.ops.compare import reference_kernel
from cardan.core.ops.loading import load_provider
from cardan.core.ops.registry import KernelRegistry
from cardan.core.ops.self_check import self_check
from cardan.platforms.rocm.providers import providers
from cardan.platforms.shared.triton import norm as triton_norm

OPS = {op.name: op for op in CATALOGUE}
OURS = ("cardan.platforms.rocm.aiter_norm", "cardan.platforms.rocm.aiter_activation")
AITER = tuple(item for item in providers("gfx942") if item.name.startswith("aiter."))
CPU = torch.device("cpu")
MI300X = ("gfx942", "mfma", "wave64", "float8_fnuz")


def check(*rows, weight=None):
    """What the kernels take on trust."""
    for tensor in rows:
        assert tensor.dim() == 2
        assert tensor.is_contiguous()
        assert tensor.numel()
    if weight is not None:
        assert weight.dtype == rows[0].dtype
        assert weight.shape == rows[0].shape[1:]


def normed(x, weight, epsilon):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight.float()


def rms_norm(input, weight, epsilon, use_model_sensitive_rmsnorm=0):
    check(input, weight=weight)
    return normed(input.float(), weight, epsilon).to(input.dtype)


def rmsnorm2d_fwd_with_add(out, input, residual_in, residual_out, weight, epsilon):
    check(input, residual_in, out, residual_out, weight=weight)
    total = input.float() + residual_in.float()
    residual_out.copy_(total)
    out.copy_(normed(total, weight, epsilon))


def silu_and_mul(out, input):
    check(out, input)
    gate, up = input.float().chunk(2, -1)
    out.copy_(torch.nn.functional.silu(gate) * up)


def gelu_tanh_and_mul(out, input):
    check(out, input)
    gate, up = input.float().chunk(2, -1)
    out.copy_(torch.nn.functional.gelu(gate, approximate="tanh") * up)


@pytest.fixture
def aiter(monkeypatch):
    """The made-up package. Triton's norms, which the host cannot run, are the definitions."""
    module = ModuleType("aiter")
    module.__spec__ = ModuleSpec("aiter", None)
    for function in (rms_norm, rmsnorm2d_fwd_with_add, silu_and_mul, gelu_tanh_and_mul):
        setattr(module, function.__name__, function)
    monkeypatch.setitem(sys.modules, "aiter", module)
    for name in ("rms_norm", "fused_add_rms_norm"):
        monkeypatch.setattr(triton_norm, name, reference_kernel(OPS[name], OPS))
    for name in OURS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield module
    for name in OURS:
        sys.modules.pop(name, None)


def loaded(op):
    (provider,) = [item for item in AITER if item.op == op]
    return load_provider(OPS[op], provider).run


def registry(*pins):
    return KernelRegistry(CATALOGUE, AITER, device=CPU, features=MI300X, pins=pins, strict=True)


def checked(provider, dtype):
    op = OPS[provider.op]
    return self_check(op, provider, load_provider(op, provider), dtype, OPS, CPU, MI300X)


def cut(wide):
    """Float32 to bfloat16 by leaving out bits."""
    return (wide.view(torch.int32) & -65536).view(torch.float32).to(torch.bfloat16)


def wider(rows, width, dtype, seed, scale=1.0):
    """A part of wider rows [rows, 2, width]."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(rows, 3, width + 8, generator=generator) * scale
    return drawn.to(dtype)[:, 1:, 8:]


def float64(tensor):
    return tensor.to(torch.float64).numpy()


def close(got, want, dtype):
    bound = {torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    np.testing.assert_allclose(float64(got), want, rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("provider", AITER, ids=lambda item: item.op)
def test_agrees_with_the_definition(aiter, provider, dtype):
    found = checked(provider, dtype)
    assert found.ok, found.text
    assert "passed" in found.text


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weights", ["narrow", "wide"])
def test_norms_of_parts_of_wider_rows(aiter, dtype, seed, weights):
    x, residual = wider(3, 64, dtype, seed), wider(3, 64, dtype, seed + 10, scale=3.0)
    weight = 1 + wider(1, 64, torch.float32, seed + 20, scale=2**-9)[0, 0]
    weight = weight.to(dtype) if weights == "narrow" else weight
    before = x.clone(), residual.clone()

    def truth(values):
        return values / np.sqrt((values**2).mean(-1, keepdims=True) + 1e-5) * float64(weight)

    close(loaded("rms_norm")(x, weight, 1e-5), truth(float64(x)), dtype)
    total = float64(x) + float64(residual)
    out, new_residual = loaded("fused_add_rms_norm")(x, residual, weight, 1e-5)
    close(new_residual, total, dtype)
    close(out, truth(total), dtype)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


def test_wide_weights_are_not_for_aiter(aiter):
    def refuse(*args):
        raise AssertionError("called")

    aiter.rms_norm = aiter.rmsnorm2d_fwd_with_add = refuse
    x, weight = torch.randn(2, 16, dtype=torch.bfloat16), torch.randn(16)
    assert torch.equal(loaded("rms_norm")(x, weight, 1e-6), triton_norm.rms_norm(x, weight, 1e-6))
    out, total = loaded("fused_add_rms_norm")(x, x, weight, 1e-6)
    assert torch.equal(total, x + x)
    assert torch.equal(out, triton_norm.rms_norm(total, weight, 1e-6))


@pytest.mark.parametrize("seed", [3, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_activations_of_dense_rows_and_of_parts_of_wider_ones(aiter, dtype, seed):
    rows = wider(3, 64, dtype, seed)[:, 0]
    gate, up = np.split(float64(rows), 2, axis=-1)
    silu = gate / (1 + np.exp(-gate)) * up
    inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    close(loaded("silu_and_mul")(rows), silu, dtype)
    close(loaded("gelu_tanh_and_mul")(rows), gate / 2 * (1 + np.tanh(inner)) * up, dtype)


def test_no_rows_launch_nothing(aiter):
    x, weight = torch.empty(0, 16, dtype=torch.bfloat16), torch.ones(16, dtype=torch.bfloat16)
    assert loaded("rms_norm")(x, weight, 1e-6).shape == (0, 16)
    assert [part.shape for part in loaded("fused_add_rms_norm")(x, x, weight, 1e-6)] == [
        (0, 16)
    ] * 2
    assert loaded("silu_and_mul")(x).shape == (0, 8)


@pytest.mark.parametrize("provider", AITER, ids=lambda item: item.op)
def test_a_build_that_cuts_instead_of_rounding_is_refused(aiter, provider):
    def cutting_norm(input, weight, epsilon):
        return cut(normed(input.float(), weight, epsilon))

    def cutting_add(out, input, residual_in, residual_out, weight, epsilon):
        total = input.float() + residual_in.float()
        residual_out.copy_(cut(total))
        out.copy_(normed(total, weight, epsilon))

    def cutting_silu(out, input):
        gate, up = input.float().chunk(2, -1)
        out.copy_(cut(torch.nn.functional.silu(gate) * up))

    def cutting_gelu(out, input):
        gate, up = input.float().chunk(2, -1)
        out.copy_(cut(torch.nn.functional.gelu(gate, approximate="tanh") * up))

    aiter.rms_norm, aiter.rmsnorm2d_fwd_with_add = cutting_norm, cutting_add
    aiter.silu_and_mul, aiter.gelu_tanh_and_mul = cutting_silu, cutting_gelu
    found = checked(provider, "bfloat16")
    assert not found.ok
    assert "x the tolerance at" in found.text


def test_comes_first_and_can_be_vetoed(aiter):
    names = [item.name for item in providers("gfx950") if item.op == "silu_and_mul"]
    assert names == ["aiter.silu_and_mul", "triton.silu_and_mul"]
    use = {"dtype": "bfloat16", "hidden": 64}
    assert registry().resolve("silu_and_mul", **use).provider == "aiter.silu_and_mul"
    vetoed = registry("-aiter.silu_and_mul").resolve("silu_and_mul", **use)
    assert vetoed.provider == REFERENCE
    assert vetoed.rejected[0].reasons == ("vetoed by the user",)


@pytest.mark.parametrize(
    ("function", "op", "other"),
    [
        ("gelu_tanh_and_mul", "gelu_tanh_and_mul", "rms_norm"),
        ("rmsnorm2d_fwd_with_add", "fused_add_rms_norm", "silu_and_mul"),
    ],
)
def test_a_module_that_lacks_a_function_is_passed_over(aiter, function, op, other):
    delattr(aiter, function)
    use = {"dtype": "bfloat16", "hidden": 64}
    found = registry().resolve(op, **use)
    assert found.provider == REFERENCE
    assert f"the module aiter has no function {function}" in found.rejected[0].reasons[0]
    assert registry().resolve(other, **use).provider == f"aiter.{other}"


def test_a_package_that_does_not_load_is_no_fault(aiter, monkeypatch):
    monkeypatch.setattr("cardan.core.interfaces.kernels._importable", lambda name: True)
    monkeypatch.setitem(sys.modules, "aiter", None)
    found = registry().resolve("rms_norm", dtype="bfloat16", hidden=64)
    assert found.provider == REFERENCE
    assert "AITER does not load beside torch" in found.rejected[0].reasons[0]


@pytest.mark.parametrize(
    ("arch", "use", "reason"),
    [
        ("gfx942", {}, ""),
        ("gfx950", {}, ""),
        ("gfx90a", {}, "needs gfx942 or gfx950"),
        ("gfx1201", {}, "needs gfx942 or gfx950"),
        ("gfx942", {"dtype": "float32"}, "dtype float32 is not among bfloat16, float16"),
        ("gfx942", {"hidden": 769}, "hidden=769 is not a multiple of 8"),
        ("gfx942", {"hidden": 16384}, "hidden=16384 exceeds 8192"),
    ],
)
def test_needs(aiter, arch, use, reason):
    (provider,) = [item for item in providers(arch) if item.name == "aiter.rms_norm"]
    verdict = check_needs(provider.needs, (arch,), {"dtype": "bfloat16", "hidden": 64, **use})
    assert verdict.reasons == ((reason,) if reason else ())


def test_is_passed_over_where_the_package_is_missing(monkeypatch):
    monkeypatch.setattr("cardan.core.interfaces.kernels._importable", lambda name: name != "aiter")
    verdict = check_needs(AITER[0].needs, (), {"dtype": "bfloat16", "hidden": 64})
    assert verdict.reasons == ("module aiter is missing",)
