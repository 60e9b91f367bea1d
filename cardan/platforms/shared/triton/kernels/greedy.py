"""The likeliest token: the vocabulary in chunks over many programs, then one program a row."""

import triton
import triton.language as tl


@triton.jit
def order_key(values):
    """int32 in the order of float32 ``values``; NaN is largest, and both zeros are equal."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(values != values, 0x7FFFFFFF, key)


@triton.jit
def chunk_maxima_kernel(
    logits, found, row_stride, vocab_size, num_chunks, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    """found [rows, num_chunks] int64: the order key of a chunk's largest logit in the upper half,
    in the lower one a number that falls with its id, so that the lowest id wins a tie."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    best = tl.full([BLOCK], -0x7FFFFFFFFFFFFFFF, tl.int64)
    for start in range(0, CHUNK, BLOCK):
        ids = chunk * CHUNK + start + tl.arange(0, BLOCK)
        inside = ids < vocab_size
        values = tl.load(logits + row * row_stride + ids, mask=inside, other=float("-inf"))
        packed = (order_key(values.to(tl.float32)).to(tl.int64) << 32) | (0x7FFFFFFF - ids)
        best = tl.where(inside & (packed > best), packed, best)
    tl.store(found + row * num_chunks + chunk, tl.max(best, 0))


@triton.jit
def row_maxima_kernel(
    found, logits, tokens, failed, row_stride, num_chunks, CHUNKS: tl.constexpr, JUDGE: tl.constexpr
):
    """tokens [rows] int64 from ``found``. JUDGE: where a row's largest logit is not finite its
    token is 0 and failed [rows] bool says so."""
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, CHUNKS)
    inside = chunks < num_chunks
    packed = tl.load(found + row * num_chunks + chunks, mask=inside, other=-0x7FFFFFFFFFFFFFFF)
    token = 0x7FFFFFFF - (tl.max(packed, 0) & 0x7FFFFFFF)
    if JUDGE:
        largest = tl.load(logits + row * row_stride + token).to(tl.float32)
        is_bad = largest * 0.0 != 0.0
        tl.store(failed + row, is_bad)
        token = tl.where(is_bad, 0, token)
    tl.store(tokens + row, token)
