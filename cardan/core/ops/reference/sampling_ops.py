"""The sampling operations as entries of the catalogue. All take float32 logits."""

from cardan.core.interfaces.kernels import OpSpec, Tolerance
from cardan.core.ops.reference import sampling_inputs as inputs
from cardan.core.ops.reference.sampling_choose import choose_tokens
from cardan.core.ops.reference.sampling_draw import greedy_tokens, sample_tokens
from cardan.core.ops.reference.sampling_edits import apply_penalties, apply_token_mask
from cardan.core.ops.reference.sampling_filters import apply_min_p_top_k_top_p
from cardan.core.ops.reference.sampling_logprobs import token_logprobs

_EXACT = {"float32": Tolerance(atol=0.0, rtol=0.0)}

SAMPLING_OPS: tuple[OpSpec, ...] = (
    OpSpec(
        name="apply_penalties",
        body=apply_penalties,
        version=2,
        tolerances={"float32": Tolerance(atol=1e-5, rtol=1e-6)},
        make_inputs=inputs.make_penalties,
        mutates=(0,),
    ),
    OpSpec(
        name="apply_token_mask",
        body=apply_token_mask,
        version=1,
        tolerances=_EXACT,
        make_inputs=inputs.make_token_mask,
    ),
    OpSpec(
        name="apply_min_p_top_k_top_p",
        body=apply_min_p_top_k_top_p,
        version=1,
        tolerances=_EXACT,
        make_inputs=inputs.make_filters,
    ),
    OpSpec(
        name="greedy_tokens",
        body=greedy_tokens,
        version=1,
        tolerances=_EXACT,
        make_inputs=inputs.make_logits,
    ),
    OpSpec(
        name="sample_tokens",
        body=sample_tokens,
        version=1,
        tolerances=_EXACT,
        make_inputs=inputs.make_sample,
    ),
    OpSpec(
        name="choose_tokens",
        body=choose_tokens,
        version=1,
        tolerances=_EXACT,
        make_inputs=inputs.make_choose,
        parts=("greedy_tokens", "apply_min_p_top_k_top_p", "sample_tokens"),
    ),
    OpSpec(
        name="token_logprobs",
        body=token_logprobs,
        version=1,
        tolerances={"float32": Tolerance(atol=1e-5, rtol=1e-6)},
        make_inputs=inputs.make_logprobs,
    ),
)
