"""Providers of vllm-xpu-kernels over made-up operations with the package's own schemas."""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch

from cardan.core.interfaces.errors import UnsupportedError
from cardan.core.interfaces.kernels import check_needs
from cardan.core.ops.catalogue import CATALOGUE
from cardan.core.ops.compare import reference_kernel
from cardan.core.ops.loading import load_provider
from cardan.core.ops.self_check import self_check
from cardan.platforms.shared.triton import norm as triton_norm
from cardan.platforms.xpu.providers import VLLM_PROVIDERS

OPS = {op.name: op for op in CATALOGUE}
OURS = "cardan.platforms.xpu.vllm_kernels"
# As strings of the package's library have them.
SCHEMAS = (
    "rms_norm(Tensor! result, Tensor input, Tensor? weight, float epsilon) -> ()",
    "fused_add_rms_norm(Tensor! input, Tensor! residual, Tensor? weight, float epsilon) -> ()",
    "silu_and_mul(Tensor! result, Tensor input) -> ()",
    "gelu_tanh_and_mul(Tensor! out, Tensor input) -> ()",
)


def rms_norm(result, input, weight, epsilon):
    assert input.is_contiguous()
    assert weight.dtype == input.dtype
    wide = input.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    result.copy_(wide * scale * weight.float())


def fused_add_rms_norm(input, residual, weight, epsilon):
    residual += input
    rms_norm(input, residual.clone(), weight, epsilon)


def silu_and_mul(result, input):
    gate, up = input.float().chunk(2, -1)
    result.copy_(torch.nn.functional.silu(gate) * up)


def gelu_tanh_and_mul(out, input):
    gate, up = input.float().chunk(2, -1)
    out.copy_(torch.nn.functional.gelu(gate, approximate="tanh") * up)


@pytest.fixture
def package(monkeypatch):
    for name in ("vllm_xpu_kernels", "vllm_xpu_kernels._C"):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, OURS, raising=False)
    # The host cannot run Triton's norms, which have the wide weights.
    for name in ("rms_norm", "fused_add_rms_norm"):
        monkeypatch.setattr(triton_norm, name, reference_kernel(OPS[name], OPS))
    library = torch.library.Library("_C", "FRAGMENT")
    for schema, body in zip(
        SCHEMAS, (rms_norm, fused_add_rms_norm, silu_and_mul, gelu_tanh_and_mul), strict=True
    ):
        library.define(schema)
        library.impl(schema.partition("(")[0], body, "CPU")
    yield
    library._destroy()
    sys.modules.pop(OURS, None)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("provider", VLLM_PROVIDERS, ids=lambda item: item.op)
def test_agrees_with_the_definition(package, provider, dtype):
    op = OPS[provider.op]
    loaded = load_provider(op, provider)
    found = self_check(op, provider, loaded, dtype, OPS, torch.device("cpu"), ())
    assert found.ok, found.text
    assert "passed" in found.text


def test_wide_weights_keep_their_digits(package):
    x, weight = torch.randn(3, 64, dtype=torch.bfloat16), 1 + torch.randn(64) * 2**-9
    truth = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6) * weight
    ours = import_module(OURS)
    torch.testing.assert_close(
        ours.rms_norm(x, weight, 1e-6), truth.to(x.dtype), rtol=2**-7, atol=0.0
    )
    out, total = ours.fused_add_rms_norm(x, torch.zeros_like(x), weight, 1e-6)
    torch.testing.assert_close(out, truth.to(x.dtype), rtol=2**-7, atol=0.0)
    assert torch.equal(total, x)


def test_is_passed_over_where_the_package_is_missing():
    (provider, *_) = VLLM_PROVIDERS
    verdict = check_needs(provider.needs, (), {"dtype": "bfloat16", "hidden": 64})
    assert verdict.reasons == ("module vllm_xpu_kernels is missing",)


def test_a_package_that_does_not_load_is_no_fault(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm_xpu_kernels._C", None)
    monkeypatch.delitem(sys.modules, OURS, raising=False)
    with pytest.raises(UnsupportedError, match="does not load beside torch"):
        import_module(OURS)
