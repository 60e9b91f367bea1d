"""What the elementwise kernels offer, as data: importing this compiles nothing. Imports no
torch."""

from cardan.core.interfaces.kernels import Needs, Provider

_DTYPES = frozenset({"float32", "bfloat16", "float16"})


def _provider(op: str, dtypes: frozenset[str] = _DTYPES) -> Provider:
    return Provider(
        op=op,
        name=f"cpu.native_{op}",
        load=f"cardan.platforms.cpu.native.elementwise:{op}",
        needs=Needs(dtypes=dtypes),
        traits=frozenset({"batch_invariant"}),
        priority=10,
    )


# With the library missing (``library.unavailable_reason()``) none of these can be loaded.
ELEMENTWISE_PROVIDERS: tuple[Provider, ...] = (
    _provider("embedding"),
    _provider("rms_norm"),
    _provider("fused_add_rms_norm"),
    _provider("rotary_embedding"),
    _provider("qk_norm_rope"),
    _provider("silu_and_mul"),
    _provider("gelu_tanh_and_mul"),
    _provider("soft_cap"),
    _provider("to_float32"),
    _provider("finite_rows"),
    _provider("greedy_tokens", frozenset({"float32"})),
)

# Who serves a rotation that attention may do together with its write to the cache.
ROTATIONS = frozenset({"cpu.native_rotary_embedding", "cpu.native_qk_norm_rope"})
