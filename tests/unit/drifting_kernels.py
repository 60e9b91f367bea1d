"""Kernels that are off by a good part of what is accepted of them, and always to the same side."""

from cardan.core.interfaces.kernels import Provider
from cardan.core.ops.catalogue import CATALOGUE
from cardan.core.ops.reference import activation, norm
from cardan.core.ops.reference import linear as products

TOLERANCES = {op.name: op.tolerances for op in CATALOGUE}
# Of the accepted error; the rest is for rounding.
SHARE = 0.4


def more(name, exact, dtype):
    """``exact``, in float32, and what is to be off, in ``dtype``."""
    accepted = TOLERANCES[name][str(dtype).removeprefix("torch.")]
    return (exact + SHARE * (accepted.atol + accepted.rtol * exact.abs())).to(dtype)


def linear(x, weight, bias):
    wide_bias = None if bias is None else bias.float()
    return more("linear", products.linear(x.float(), weight.float(), wide_bias), x.dtype)


def rms_norm(x, weight, eps):
    return more("rms_norm", norm.rms_norm(x.float(), weight.float(), eps), x.dtype)


def fused_add_rms_norm(x, residual, weight, eps):
    total = x + residual
    exact = norm.rms_norm(total.float(), weight.float(), eps)
    return more("fused_add_rms_norm", exact, x.dtype), total


def silu_and_mul(x):
    return more("silu_and_mul", activation.silu_and_mul(x.float()), x.dtype)


NAMES = ("linear", "rms_norm", "fused_add_rms_norm", "silu_and_mul")
PROVIDERS = tuple(
    Provider(op=name, name=f"test.drifting_{name}", load=f"drifting_kernels:{name}")
    for name in NAMES
)
