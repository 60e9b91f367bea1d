"""What the kernels for quantised blocks offer, as data: importing this compiles nothing. Imports
no torch."""

from cardan.core.interfaces.kernels import Needs, Provider

_MODULE = "cardan.platforms.cpu.native.blocks"
_DTYPES = frozenset({"float32", "bfloat16", "float16"})
_FORMATS: frozenset[int | float | str | bool] = frozenset(
    {
        *("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "iq4_nl"),
        *("q2_k", "q3_k", "q4_k", "q5_k", "q6_k"),
    }
)
_BATCH_INVARIANT = frozenset({"batch_invariant"})

# With the library missing (``library.unavailable_reason()``) none of these can be loaded.
BLOCK_PROVIDERS: tuple[Provider, ...] = (
    Provider(
        op="block_linear",
        name="cpu.native_block_linear",
        load=f"{_MODULE}:block_linear",
        prepare=f"{_MODULE}:prepare_blocks",
        needs=Needs(dtypes=_DTYPES, one_of={"format": _FORMATS}),
        traits=_BATCH_INVARIANT,
        priority=10,
    ),
    Provider(
        op="block_embedding",
        name="cpu.native_block_embedding",
        load=f"{_MODULE}:block_embedding",
        needs=Needs(dtypes=_DTYPES, one_of={"format": _FORMATS}),
        traits=_BATCH_INVARIANT,
        priority=10,
    ),
    Provider(
        op="int8_linear",
        name="cpu.native_int8_linear",
        load=f"{_MODULE}:int8_linear",
        prepare=f"{_MODULE}:prepare_int8",
        # Sums are of 32 bits.
        needs=Needs(dtypes=_DTYPES, at_most={"in_features": 132104}),
        traits=_BATCH_INVARIANT,
        priority=10,
    ),
)
