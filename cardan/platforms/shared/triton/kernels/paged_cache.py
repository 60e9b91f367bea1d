"""Writing keys and values into a paged cache."""

import triton
import triton.language as tl


@triton.jit
def write_kernel(
    k,
    v,
    cache,
    slot_mapping,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    block_stride,
    kv_stride,
    head_stride,
    token_stride,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    DIMS: tl.constexpr,
):
    """One program a token: its heads of k and v go to its slot; a token with slot -1 goes nowhere.

    HEADS and DIMS are the powers of two that hold NUM_HEADS and the larger head dim.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    head = tl.arange(0, HEADS)[:, None]
    dim = tl.arange(0, DIMS)[None, :]
    into = (
        cache
        + (slot // BLOCK_SIZE) * block_stride
        + (slot % BLOCK_SIZE) * token_stride
        + head * head_stride
        + dim
    )
    kind = cache.dtype.element_ty
    k_mask = (head < NUM_HEADS) & (dim < K_DIM)
    keys = tl.load(k + token * k_token_stride + head * k_head_stride + dim, mask=k_mask, other=0.0)
    tl.store(into, keys.to(kind), mask=k_mask)
    v_mask = (head < NUM_HEADS) & (dim < V_DIM)
    values = tl.load(
        v + token * v_token_stride + head * v_head_stride + dim, mask=v_mask, other=0.0
    )
    tl.store(into + kv_stride, values.to(kind), mask=v_mask)
