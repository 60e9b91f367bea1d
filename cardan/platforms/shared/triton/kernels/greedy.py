"""The likeliest token: the vocabulary in chunks over many programs, then one program a row."""

import triton
import triton.language as tl

from cardan.platforms.shared.triton.launched import launched


@triton.jit
def order_key(values):
    """int32 in the order of float32 ``values``; NaN is largest, and both zeros are equal."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(values != values, 0x7FFFFFFF, key)


@triton.jit
def key_value(key):
    """The float32 whose order key is int32 ``key``."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@launched
@triton.jit(do_not_specialize=["num_chunks"])
def chunk_maxima_kernel(
    logits, found, row_stride, vocab_size, num_chunks, CHUNK: tl.constexpr, PARTS: tl.constexpr
):
    """found [rows, num_chunks * PARTS] int64, one for each part of a chunk: the order key of the
    part's largest logit in the upper half, in the lower one a number that falls with its id, so
    that the lowest id wins a tie. Parts past the vocabulary's end are below all others."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = ids < vocab_size
    values = tl.load(logits + row * row_stride + ids, mask=inside, other=float("-inf"))
    packed = (order_key(values.to(tl.float32)).to(tl.int64) << 32) | (0x7FFFFFFF - ids)
    packed = tl.where(inside, packed, -0x7FFFFFFFFFFFFFFF)
    best = tl.max(tl.reshape(packed, [PARTS, CHUNK // PARTS]), 1)
    tl.store(found + (row * num_chunks + chunk) * PARTS + tl.arange(0, PARTS), best)


@launched
@triton.jit(do_not_specialize=["num_maxima"])
def row_maxima_kernel(
    found, logits, tokens, failed, row_stride, num_maxima, BLOCK: tl.constexpr, JUDGE: tl.constexpr
):
    """tokens [rows] int64 from ``found`` [rows, num_maxima]. JUDGE: where a row's largest logit is
    not finite its token is 0 and failed [rows] bool says so."""
    row = tl.program_id(0).to(tl.int64)
    best = tl.full([BLOCK], -0x7FFFFFFFFFFFFFFF, tl.int64)
    for start in range(0, num_maxima, BLOCK):
        places = start + tl.arange(0, BLOCK)
        packed = tl.load(
            found + row * num_maxima + places,
            mask=places < num_maxima,
            other=-0x7FFFFFFFFFFFFFFF,
        )
        best = tl.maximum(best, packed)
    token = 0x7FFFFFFF - (tl.max(best, 0) & 0x7FFFFFFF)
    if JUDGE:
        largest = tl.load(logits + row * row_stride + token).to(tl.float32)
        is_bad = largest * 0.0 != 0.0
        tl.store(failed + row, is_bad)
        token = tl.where(is_bad, 0, token)
    tl.store(tokens + row, token)
