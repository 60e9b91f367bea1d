"""What the Triton kernels offer, as data: importing this imports neither torch nor Triton."""

from cardan.core.interfaces.kernels import Needs, Provider

_HERE = "cardan.platforms.shared.triton"
_DTYPES = frozenset({"float32", "bfloat16", "float16"})
# A program holds a row of this many elements, which is what registers allow.
_LONGEST_ROW = 16384
# Programs count the logits that each of their lanes sees in ten bits.
_LARGEST_VOCABULARY = 1 << 22
_SAME_IN_ANY_BATCH = frozenset({"batch_invariant"})
# Providers whose work the attention's cache write may do at once.
ROTATIONS = frozenset({"triton.rotary_embedding", "triton.qk_norm_rope"})


def _provider(
    op: str,
    module: str,
    dtypes: frozenset[str],
    traits: frozenset[str] = _SAME_IN_ANY_BATCH,
    **at_most: float,
) -> Provider:
    return Provider(
        op=op,
        name=f"triton.{op}",
        load=f"{_HERE}.{module}:{op}",
        needs=Needs(dtypes=dtypes, at_most=at_most, modules=("triton",)),
        traits=traits | {"graph_safe"},
    )


TRITON_PROVIDERS: tuple[Provider, ...] = (
    # Few rows are summed in another order than many.
    _provider("linear", "linear", frozenset({"bfloat16", "float16"}), traits=frozenset()),
    _provider("linear_float32", "linear", frozenset({"bfloat16", "float16"}), traits=frozenset()),
    _provider("rms_norm", "norm", _DTYPES, hidden=_LONGEST_ROW),
    _provider("fused_add_rms_norm", "norm", _DTYPES, hidden=_LONGEST_ROW),
    _provider("rotary_embedding", "rotation", _DTYPES, head_dim=1024),
    _provider("qk_norm_rope", "rotation", _DTYPES, head_dim=1024),
    _provider("silu_and_mul", "pointwise", _DTYPES),
    _provider("gelu_tanh_and_mul", "pointwise", _DTYPES),
    _provider("route_experts", "experts", _DTYPES, num_experts=1024),
    Provider(
        op="expert_mlp",
        name="triton.expert_mlp",
        load=f"{_HERE}.experts:expert_mlp",
        needs=Needs(dtypes=_DTYPES, at_most={"num_experts": 1024}, modules=("triton",)),
        traits=frozenset({"graph_safe"}),
    ),
    _provider("soft_cap", "pointwise", _DTYPES),
    _provider("finite_rows", "pointwise", _DTYPES),
    _provider("step_inputs", "step_inputs", frozenset({"float32"})),
    _provider("greedy_tokens", "greedy", frozenset({"float32"})),
    _provider("choose_tokens", "choose", frozenset({"float32"}), vocab_size=_LARGEST_VOCABULARY),
)
