"""What the kernels compiled by numba offer, as data: importing this compiles nothing. Imports
neither torch nor numba."""

from cardan.core.interfaces.kernels import Needs, Provider
from cardan.platforms.cpu.numba.codes import CODE_FORMATS

_FOLDER = "cardan.platforms.cpu.numba"
_FORMATS: frozenset[int | float | str | bool] = frozenset(CODE_FORMATS)
# Below the native kernels, which are first where they can be had, and above torch.
_PRIORITY = 5


def _elementwise(op: str) -> Provider:
    return Provider(
        op=op,
        name=f"cpu.numba_{op}",
        load=f"{_FOLDER}.elementwise:{op}",
        needs=Needs(dtypes=frozenset({"float32"}), modules=("numba",)),
        priority=_PRIORITY,
    )


_BLOCK_NEEDS = Needs(
    dtypes=frozenset({"float32", "bfloat16", "float16"}),
    one_of={"format": _FORMATS},
    modules=("numba",),
)

NUMBA_PROVIDERS: tuple[Provider, ...] = (
    Provider(
        op="block_linear",
        name="cpu.numba_block_linear",
        load=f"{_FOLDER}.blocks:block_linear",
        prepare=f"{_FOLDER}.blocks:prepare_blocks",
        needs=_BLOCK_NEEDS,
        priority=_PRIORITY,
    ),
    Provider(
        op="block_embedding",
        name="cpu.numba_block_embedding",
        load=f"{_FOLDER}.blocks:block_embedding",
        needs=_BLOCK_NEEDS,
        priority=_PRIORITY,
    ),
    _elementwise("rms_norm"),
    _elementwise("fused_add_rms_norm"),
    _elementwise("rotary_embedding"),
    _elementwise("silu_and_mul"),
)
