"""The shape of a layer's cache that the kernels of TPUs read without waste."""

from cardan.platforms.tpu.pallas.tiles import LANES

# The least rows of a tile, of any dtype.
_LEAST_ROWS = 8


def cache_shape(
    num_blocks: int, kv_heads: int, block_size: int, head_dim: int
) -> tuple[int, int, int, int, int]:
    """``[num_blocks, 2, kv_heads, block_size / n, n * head_dim]``, n tokens of a head to a row.

    TPUs fill rows up to 128 numbers: of heads of 64 they would either hold twice as much or, which
    is what XLA does where it may choose, turn the cache round before each kernel. So tokens share
    rows of 128, in order, where head and block sizes allow it; n is 1 elsewhere.
    """
    tokens = max(LANES // head_dim, 1)
    if LANES % head_dim or block_size % (tokens * _LEAST_ROWS):
        tokens = 1
    return num_blocks, 2, kv_heads, block_size // tokens, tokens * head_dim
