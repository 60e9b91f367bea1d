"""Providers of intel-extension-for-pytorch over a made-up package with its own signatures."""

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
from cardan.platforms.shared.triton import norm as triton_norm
from cardan.platforms.xpu import ipex_import
from cardan.platforms.xpu.providers import IPEX_PROVIDERS, VLLM_PROVIDERS, providers

OPS = {op.name: op for op in CATALOGUE}
OURS = ("cardan.platforms.xpu.ipex_norm", "cardan.platforms.xpu.ipex_activation")
PACKAGE = "intel_extension_for_pytorch"
CPU = torch.device("cpu")
USE = {"dtype": "bfloat16", "hidden": 64}
SCHEMAS = (
    "silu_and_mul(Tensor x, Tensor(a!) out) -> ()",
    "gelu_and_mul(Tensor x, Tensor(a!) out, str approximate) -> ()",
)


def check(*rows):
    for tensor in rows:
        assert tensor.is_contiguous()
        assert tensor.numel()


def rms_norm(hidden_states, weight, eps):
    check(hidden_states, weight)
    assert weight.dtype == hidden_states.dtype
    wide = hidden_states.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(hidden_states.dtype)


def add_rms_norm(residual, x, weight, bias, eps, add_back=False):
    check(residual, x)
    assert bias is None
    total = residual + x
    if add_back:
        residual.copy_(total)
    return rms_norm(total, weight, eps)


def silu_and_mul(x, out):
    check(x, out)
    gate, up = x.float().chunk(2, -1)
    out.copy_(torch.nn.functional.silu(gate) * up)


def gelu_and_mul(x, out, approximate):
    check(x, out)
    gate, up = x.float().chunk(2, -1)
    out.copy_(torch.nn.functional.gelu(gate, approximate=approximate) * up)


@pytest.fixture
def ipex(monkeypatch):
    """The module of its functions. Triton's norms, which the host cannot run, are definitions."""
    for name in (PACKAGE, f"{PACKAGE}.llm", f"{PACKAGE}.llm.functional"):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    module.rms_norm, module.add_rms_norm = rms_norm, add_rms_norm
    monkeypatch.setattr(ipex_import, "version", lambda name: f"{torch.__version__[:4]}.10+xpu")
    for name in ("rms_norm", "fused_add_rms_norm"):
        monkeypatch.setattr(triton_norm, name, reference_kernel(OPS[name], OPS))
    for name in OURS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield module
    for name in OURS:
        sys.modules.pop(name, None)


@pytest.fixture
def operators():
    library = torch.library.Library("torch_ipex", "FRAGMENT")
    for schema, body in zip(SCHEMAS, (silu_and_mul, gelu_and_mul), strict=True):
        library.define(schema)
        library.impl(schema.partition("(")[0], body, "CPU")
    yield
    library._destroy()


def loaded(op):
    (provider,) = [item for item in IPEX_PROVIDERS if item.op == op]
    return load_provider(OPS[op], provider).run


def resolved(op, *pins, offered=IPEX_PROVIDERS):
    """By a registry to which faults are errors."""
    registry = KernelRegistry(CATALOGUE, offered, device=CPU, features=(), pins=pins, strict=True)
    return registry.resolve(op, **USE)


def wider(width, dtype, seed, scale=1.0):
    """A part of wider rows [3, 2, width]."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(3, 3, width + 8, generator=generator) * scale
    return drawn.to(dtype)[:, 1:, 8:]


def float64(tensor):
    return tensor.to(torch.float64).numpy()


def close(got, want, dtype):
    """Two roundings, of the sum and of the result."""
    bound = {torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    np.testing.assert_allclose(float64(got), want, rtol=1.1 * bound, atol=bound)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("provider", IPEX_PROVIDERS, ids=lambda item: item.op)
def test_agrees_with_the_definition(ipex, operators, provider, dtype):
    op = OPS[provider.op]
    found = self_check(op, provider, load_provider(op, provider), dtype, OPS, CPU, ())
    assert found.ok, found.text
    assert "passed" in found.text


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weights", ["narrow", "wide"])
def test_norms_of_parts_of_wider_rows(ipex, dtype, seed, weights):
    x, residual = wider(64, dtype, seed), wider(64, dtype, seed + 10, scale=3.0)
    weight = 1 + wider(64, torch.float32, seed + 20, scale=2**-9)[0, 0]
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


@pytest.mark.parametrize("seed", [3, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_activations_of_parts_of_wider_rows(ipex, operators, dtype, seed):
    x = wider(64, dtype, seed)
    gate, up = np.split(float64(x), 2, axis=-1)
    inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    close(loaded("silu_and_mul")(x), gate / (1 + np.exp(-gate)) * up, dtype)
    close(loaded("gelu_tanh_and_mul")(x), gate / 2 * (1 + np.tanh(inner)) * up, dtype)


def test_no_rows_launch_nothing(ipex, operators):
    x, weight = torch.empty(0, 16, dtype=torch.bfloat16), torch.ones(16, dtype=torch.bfloat16)
    assert loaded("rms_norm")(x, weight, 1e-6).shape == (0, 16)
    assert loaded("fused_add_rms_norm")(x, x, weight, 1e-6)[1].shape == (0, 16)
    assert loaded("silu_and_mul")(x).shape == (0, 8)
    assert loaded("gelu_tanh_and_mul")(x).shape == (0, 8)


def test_comes_between_vllm_and_triton(ipex, operators):
    names = [item.name.partition(".")[0] for item in providers(True) if item.op == "rms_norm"]
    assert names == ["vllm_xpu", "ipex", "triton"]
    assert min(item.priority for item in VLLM_PROVIDERS) > max(
        item.priority for item in IPEX_PROVIDERS
    )
    found = resolved("rms_norm", offered=(*VLLM_PROVIDERS, *IPEX_PROVIDERS))
    assert found.provider == "ipex.rms_norm"
    assert found.rejected[0].reasons == ("module vllm_xpu_kernels is missing",)
    assert resolved("rms_norm", "-ipex.rms_norm").provider == REFERENCE


def test_a_wrong_sum_is_refused(ipex, monkeypatch):
    ipex.add_rms_norm = lambda residual, x, weight, bias, eps, add_back: rms_norm(x, weight, eps)
    (provider,) = [item for item in IPEX_PROVIDERS if item.op == "fused_add_rms_norm"]
    op = OPS[provider.op]
    found = self_check(op, provider, load_provider(op, provider), "bfloat16", OPS, CPU, ())
    assert not found.ok


def test_a_release_that_lacks_functions_is_passed_over(ipex):
    del ipex.add_rms_norm
    for op in ("rms_norm", "silu_and_mul"):
        found = resolved(op)
        assert found.provider == REFERENCE
        assert "is too old" in found.rejected[0].reasons[0]


def test_is_not_imported_beside_another_torch(ipex, monkeypatch):
    monkeypatch.setattr(ipex_import, "version", lambda name: "2.1.30+xpu")
    monkeypatch.setattr(ipex_import, "import_module", lambda name: pytest.fail(f"imports {name}"))
    (reason,) = resolved("rms_norm").rejected[0].reasons
    assert reason.startswith("intel-extension-for-pytorch 2.1.30+xpu is not for torch 2.")


def test_a_package_that_ends_the_process_does_not(ipex, monkeypatch):
    def leave(name):
        raise SystemExit(127)

    monkeypatch.setattr(ipex_import, "import_module", leave)
    (reason,) = resolved("silu_and_mul").rejected[0].reasons
    assert "does not load beside torch" in reason


def test_a_package_of_unknown_version_is_passed_over(ipex, monkeypatch):
    def missing(name):
        raise ipex_import.PackageNotFoundError(name)

    monkeypatch.setattr(ipex_import, "version", missing)
    (reason,) = resolved("rms_norm").rejected[0].reasons
    assert "does not say which torch" in reason


def test_is_passed_over_where_the_package_is_missing(monkeypatch):
    monkeypatch.setattr("cardan.core.interfaces.kernels._importable", lambda name: name == "triton")
    verdict = check_needs(IPEX_PROVIDERS[0].needs, (), USE)
    assert verdict.reasons == ("module intel_extension_for_pytorch is missing",)
