"""What the Triton kernels offer, as data: importing this imports neither torch nor Triton."""

from cardan.core.interfaces.kernels import Needs, Provider

_HERE = "cardan.platforms.shared.triton"
_DTYPES = frozenset({"float32", "bfloat16", "float16"})
# A program holds a row of this many elements, which is what registers allow.
_LONGEST_ROW = 16384


def _provider(op: str, module: str, dtypes: frozenset[str], **at_most: float) -> Provider:
    return Provider(
        op=op,
        name=f"triton.{op}",
        load=f"{_HERE}.{module}:{op}",
        needs=Needs(dtypes=dtypes, at_most=at_most, modules=("triton",)),
        traits=frozenset({"graph_safe", "batch_invariant"}),
    )


TRITON_PROVIDERS: tuple[Provider, ...] = (
    _provider("linear", "linear", frozenset({"bfloat16", "float16"})),
    _provider("rms_norm", "norm", _DTYPES, hidden=_LONGEST_ROW),
    _provider("fused_add_rms_norm", "norm", _DTYPES, hidden=_LONGEST_ROW),
    _provider("rotary_embedding", "rotation", _DTYPES, head_dim=1024),
    _provider("qk_norm_rope", "rotation", _DTYPES, head_dim=1024),
    _provider("silu_and_mul", "pointwise", _DTYPES),
    _provider("gelu_tanh_and_mul", "pointwise", _DTYPES),
    _provider("soft_cap", "pointwise", _DTYPES),
    _provider("finite_rows", "pointwise", _DTYPES, hidden=_LONGEST_ROW),
    _provider("greedy_tokens", "greedy", frozenset({"float32"})),
    _provider("choose_tokens", "choose", frozenset({"float32"})),
)
