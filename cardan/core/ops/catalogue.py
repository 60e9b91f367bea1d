"""The named operations that models and the sampler are written in."""

from cardan.core.interfaces.kernels import OpSpec, Tolerance
from cardan.core.ops.reference import block_inputs, expert_inputs, inputs
from cardan.core.ops.reference.activation import gelu_tanh_and_mul, silu_and_mul, soft_cap
from cardan.core.ops.reference.blocks import block_embedding, block_linear, int8_linear
from cardan.core.ops.reference.experts import expert_mlp, route_experts
from cardan.core.ops.reference.hidden import finite_rows, to_float32
from cardan.core.ops.reference.linear import embedding, linear, linear_float32
from cardan.core.ops.reference.norm import fused_add_rms_norm, rms_norm
from cardan.core.ops.reference.rope import qk_norm_rope, rotary_embedding
from cardan.core.ops.reference.sampling_ops import SAMPLING_OPS
from cardan.core.ops.reference.step_inputs import step_inputs
from cardan.core.ops.reference.step_inputs_cases import make_step_inputs

_EXACT = Tolerance(atol=0.0, rtol=0.0)
# About 2 units in the last place of the result, and as much of 1 for what cancels.
_ROUNDED = {
    "float32": Tolerance(atol=2e-6, rtol=2e-6),
    "bfloat16": Tolerance(atol=1e-2, rtol=1e-2),
    "float16": Tolerance(atol=1e-3, rtol=2e-3),
}
# Sums, and operations that round more than once on the way.
_SUMMED = {
    "float32": Tolerance(atol=1e-5, rtol=1e-5),
    "bfloat16": Tolerance(atol=3e-2, rtol=2e-2),
    "float16": Tolerance(atol=4e-3, rtol=4e-3),
}
# For outputs of order 1 of providers that round activations to 8 bits in blocks of 32 (or rows):
# a standard deviation of about 0.005. One that does not may state a narrower tolerance.
_QUANTIZED = {
    "float32": Tolerance(atol=3e-2, rtol=1e-2),
    "bfloat16": Tolerance(atol=3e-2, rtol=2e-2),
    "float16": Tolerance(atol=3e-2, rtol=1e-2),
}

# Weights of experts, which are float32 whatever the logits are.
_SHARES = dict.fromkeys(_ROUNDED, Tolerance(atol=1e-6, rtol=1e-5))

CATALOGUE: tuple[OpSpec, ...] = (
    OpSpec(
        name="embedding",
        body=embedding,
        version=1,
        tolerances={"float32": _EXACT, "bfloat16": _EXACT, "float16": _EXACT},
        make_inputs=inputs.make_embedding,
    ),
    OpSpec(
        name="linear",
        body=linear,
        version=1,
        tolerances=_SUMMED,
        make_inputs=inputs.make_linear,
        prepares=1,
    ),
    OpSpec(
        name="linear_float32",
        body=linear_float32,
        version=1,
        tolerances=_SUMMED,
        make_inputs=inputs.make_linear_float32,
        parts=("linear", "to_float32"),
    ),
    OpSpec(
        name="block_embedding",
        body=block_embedding,
        version=1,
        tolerances=_ROUNDED,
        make_inputs=block_inputs.make_block_embedding,
    ),
    OpSpec(
        name="block_linear",
        body=block_linear,
        version=1,
        tolerances=_QUANTIZED,
        make_inputs=block_inputs.make_block_linear,
        prepares=1,
    ),
    OpSpec(
        name="int8_linear",
        body=int8_linear,
        version=1,
        tolerances=_QUANTIZED,
        make_inputs=block_inputs.make_int8_linear,
        prepares=1,
    ),
    OpSpec(
        name="rms_norm",
        body=rms_norm,
        version=1,
        tolerances=_ROUNDED,
        make_inputs=inputs.make_rms_norm,
    ),
    OpSpec(
        name="fused_add_rms_norm",
        body=fused_add_rms_norm,
        version=1,
        tolerances=_SUMMED,
        make_inputs=inputs.make_fused_add_rms_norm,
        parts=("rms_norm",),
    ),
    OpSpec(
        name="rotary_embedding",
        body=rotary_embedding,
        version=1,
        tolerances=_ROUNDED,
        make_inputs=inputs.make_rotary_embedding,
    ),
    OpSpec(
        name="qk_norm_rope",
        body=qk_norm_rope,
        version=1,
        tolerances=_SUMMED,
        make_inputs=inputs.make_qk_norm_rope,
        parts=("rms_norm", "rotary_embedding"),
    ),
    OpSpec(
        name="silu_and_mul",
        body=silu_and_mul,
        version=1,
        tolerances=_ROUNDED,
        make_inputs=inputs.make_gated,
    ),
    OpSpec(
        name="gelu_tanh_and_mul",
        body=gelu_tanh_and_mul,
        version=1,
        tolerances=_ROUNDED,
        make_inputs=inputs.make_gated,
    ),
    OpSpec(
        name="route_experts",
        body=route_experts,
        version=1,
        tolerances=_SHARES,
        make_inputs=expert_inputs.make_route_experts,
    ),
    OpSpec(
        name="expert_mlp",
        body=expert_mlp,
        version=1,
        tolerances=_SUMMED,
        make_inputs=expert_inputs.make_expert_mlp,
        prepares=1,
    ),
    OpSpec(
        name="soft_cap",
        body=soft_cap,
        version=1,
        tolerances=_ROUNDED,
        make_inputs=inputs.make_soft_cap,
    ),
    OpSpec(
        name="to_float32",
        body=to_float32,
        version=1,
        tolerances={"float32": _EXACT, "bfloat16": _EXACT, "float16": _EXACT},
        make_inputs=inputs.make_to_float32,
    ),
    OpSpec(
        name="finite_rows",
        body=finite_rows,
        version=1,
        tolerances={"float32": _EXACT, "bfloat16": _EXACT, "float16": _EXACT},
        make_inputs=inputs.make_finite_rows,
    ),
    # Integers only: bound for float32 whatever the model's dtype, like the sampler's operations.
    OpSpec(
        name="step_inputs",
        body=step_inputs,
        version=1,
        tolerances={"float32": _EXACT},
        make_inputs=make_step_inputs,
        mutates=(1, 2, 3, 4, 5),
    ),
    *SAMPLING_OPS,
)
