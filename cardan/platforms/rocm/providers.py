"""Kernels of AMD's AITER for its data centre GPUs, as data: importing this imports none of them.

What is called has the signatures of ROCm/aiter (``aiter.ops.rmsnorm``, ``aiter.ops.activation``),
whose leading arguments are the same in all releases that were read:

    rms_norm(input, weight, epsilon) -> Tensor
    rmsnorm2d_fwd_with_add(out, input, residual_in, residual_out, weight, epsilon) -> None
    silu_and_mul(out, input) -> None
    gelu_tanh_and_mul(out, input) -> None
"""

from cardan.core.interfaces.kernels import Needs, Provider, Tolerance
from cardan.platforms.shared.triton.providers import TRITON_PROVIDERS

_HERE = "cardan.platforms.rocm"
_SHORT = frozenset({"bfloat16", "float16"})
# AITER's table of supported hardware calls others experimental; its wheels are for these.
_ARCHITECTURES = ("gfx942", "gfx950")
# Vectors of 16 bytes; some releases corrupt rows of odd length.
_ALIGNMENT = 8
# Rows of one program of its HIP kernels. Who serves longer ones differs by release.
_LONGEST_ROW = 8192
# Half a unit in the last place of bfloat16 (2**-8), and what float32 adds. Builds of AITER may cut
# results off where others round, by default on gfx942: errors of a whole unit that all shrink the
# numbers, and so add up from layer to layer. The operations' own tolerances would let them pass.
_ROUNDED = {"bfloat16": Tolerance(atol=1e-4, rtol=4.2e-3)}


def providers(arch: str) -> tuple[Provider, ...]:
    """All for a GPU of the instruction set, preferred ones first; what AITER does not support
    has a need that no device meets."""
    served = arch in _ARCHITECTURES
    features = frozenset() if served else frozenset({" or ".join(_ARCHITECTURES)})
    return (
        _aiter("rms_norm", "aiter_norm", features, hidden=_LONGEST_ROW),
        _aiter("fused_add_rms_norm", "aiter_norm", features, hidden=_LONGEST_ROW),
        _aiter("silu_and_mul", "aiter_activation", features),
        _aiter("gelu_tanh_and_mul", "aiter_activation", features),
        *TRITON_PROVIDERS,
    )


def _aiter(op: str, module: str, features: frozenset[str], **at_most: float) -> Provider:
    return Provider(
        op=op,
        name=f"aiter.{op}",
        load=f"{_HERE}.{module}:{op}",
        needs=Needs(
            dtypes=_SHORT,
            features=features,
            multiple_of={"hidden": _ALIGNMENT},
            at_most=at_most,
            # Norms with wide weights are Triton's.
            modules=("aiter", "triton"),
        ),
        priority=1,
        tolerances=_ROUNDED,
    )
