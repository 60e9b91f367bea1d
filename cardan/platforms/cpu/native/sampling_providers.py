"""What the sampling kernels offer, as data: importing this compiles nothing. Imports no torch."""

from cardan.core.interfaces.kernels import Needs, Provider


def _provider(op: str, version: int = 1) -> Provider:
    return Provider(
        op=op,
        name=f"cpu.native_{op}",
        load=f"cardan.platforms.cpu.native.sampling:{op}",
        version=version,
        needs=Needs(dtypes=frozenset({"float32"})),
        traits=frozenset({"batch_invariant"}),
        priority=10,
    )


# With the library missing (``library.unavailable_reason()``) none of these can be loaded.
SAMPLING_PROVIDERS: tuple[Provider, ...] = (
    _provider("apply_penalties", version=2),
    _provider("apply_token_mask"),
    _provider("choose_tokens"),
    _provider("token_logprobs"),
)
