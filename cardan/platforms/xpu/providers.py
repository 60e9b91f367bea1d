"""Kernels of other packages for Intel's GPUs, as data: importing this imports none of them.

``vllm-xpu-kernels`` registers its operations with torch when ``vllm_xpu_kernels._C`` is imported.
What is used here has the schemas of its release 0.1.16, in which they are written out:

    rms_norm(Tensor! result, Tensor input, Tensor? weight, float epsilon) -> ()
    fused_add_rms_norm(Tensor! input, Tensor! residual, Tensor? weight, float epsilon) -> ()
    silu_and_mul(Tensor! result, Tensor input) -> ()
    gelu_tanh_and_mul(Tensor! out, Tensor input) -> ()

intel-extension-for-pytorch, which is archived, comes after it. What is called of it has the
signatures of its ``llm.functional.fusions`` and, for operators of ``torch.ops.torch_ipex``, of
their calls in its ``transformers.models.xpu.fusions.activation_fusion``:

    rms_norm(hidden_states, weight, eps) -> Tensor
    add_rms_norm(residual, x, weight, bias, eps, add_back=False) -> Tensor
    torch_ipex.silu_and_mul(x, out)
    torch_ipex.gelu_and_mul(x, out, approximate)
"""

from dataclasses import replace

from cardan.core.interfaces.kernels import Needs, Provider
from cardan.platforms.shared.triton.providers import TRITON_PROVIDERS

_SHORT = frozenset({"bfloat16", "float16"})
_HERE = "cardan.platforms.xpu"
# Vectors of 16 bytes of the shortest dtypes.
_ALIGNMENT = 8


def _needs(module: str) -> Needs:
    """Norms with wide weights are Triton's, whoever has the others."""
    return Needs(dtypes=_SHORT, multiple_of={"hidden": _ALIGNMENT}, modules=(module, "triton"))


def _vllm(op: str) -> Provider:
    return Provider(
        op=op,
        name=f"vllm_xpu.{op}",
        load=f"{_HERE}.vllm_kernels:{op}",
        needs=_needs("vllm_xpu_kernels"),
        traits=frozenset({"batch_invariant"}),
        priority=2,
    )


def _ipex(op: str, module: str) -> Provider:
    return Provider(
        op=op,
        name=f"ipex.{op}",
        load=f"{_HERE}.{module}:{op}",
        needs=_needs("intel_extension_for_pytorch"),
        priority=1,
    )


VLLM_PROVIDERS: tuple[Provider, ...] = tuple(
    map(_vllm, ("rms_norm", "fused_add_rms_norm", "silu_and_mul", "gelu_tanh_and_mul"))
)
IPEX_PROVIDERS: tuple[Provider, ...] = (
    _ipex("rms_norm", "ipex_norm"),
    _ipex("fused_add_rms_norm", "ipex_norm"),
    _ipex("silu_and_mul", "ipex_activation"),
    _ipex("gelu_tanh_and_mul", "ipex_activation"),
)
# Operations whose Triton kernels count in float64.
_WITH_FLOAT64 = frozenset({"choose_tokens"})


def providers(has_fp64: bool) -> tuple[Provider, ...]:
    """All, preferred ones first; those that need float64 say so on devices that lack it."""
    triton = TRITON_PROVIDERS
    if not has_fp64:
        triton = tuple(_with_fp64(item) if item.op in _WITH_FLOAT64 else item for item in triton)
    return (*VLLM_PROVIDERS, *IPEX_PROVIDERS, *triton)


def _with_fp64(provider: Provider) -> Provider:
    return replace(provider, needs=replace(provider.needs, features=frozenset({"fp64"})))
