"""What the kernels for mixtures of experts offer, as data: importing this compiles nothing. Imports
no torch."""

from cardan.core.interfaces.kernels import Needs, Provider

_MODULE = "cardan.platforms.cpu.native.experts"
_NEEDS = Needs(dtypes=frozenset({"float32", "bfloat16", "float16"}))

# With the library missing (``library.unavailable_reason()``) none of these can be loaded.
EXPERT_PROVIDERS: tuple[Provider, ...] = (
    Provider(
        op="route_experts",
        name="cpu.native_route_experts",
        load=f"{_MODULE}:route_experts",
        needs=_NEEDS,
        traits=frozenset({"batch_invariant"}),
        priority=10,
    ),
    Provider(
        op="expert_mlp",
        name="cpu.native_expert_mlp",
        load=f"{_MODULE}:expert_mlp",
        prepare=f"{_MODULE}:prepare_experts",
        needs=_NEEDS,
        traits=frozenset({"batch_invariant"}),
        priority=10,
    ),
)
