"""What the native kernels offer, as data: importing this compiles nothing. Imports no torch."""

from cardan.core.interfaces.kernels import Needs, Provider

# With the library missing (``library.unavailable_reason()``) none of these can be loaded.
LINEAR_PROVIDERS: tuple[Provider, ...] = (
    Provider(
        op="linear",
        name="cpu.native_linear",
        load="cardan.platforms.cpu.native.linear:linear",
        prepare="cardan.platforms.cpu.native.linear:prepare_linear",
        needs=Needs(dtypes=frozenset({"float32", "bfloat16", "float16"})),
        traits=frozenset({"batch_invariant"}),
        priority=10,
    ),
)
