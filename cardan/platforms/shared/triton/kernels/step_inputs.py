"""A step's tensors from the rows and what changed of them: one launch.

No program reads what another one, or itself, has written: what comes with the step is read where
it was packed.
"""

import triton
import triton.language as tl

from cardan.platforms.shared.triton.launched import launched


@triton.jit
def pad_tokens(token_fields, slots, stride, tokens, padded, begin, step, BLOCK: tl.constexpr):
    """Tokens behind the last one are zeros without a slot."""
    for at in range(tokens + begin, padded, step):
        token = at + tl.arange(0, BLOCK)
        mask = token < padded
        zeros = tl.zeros((BLOCK,), tl.int64)
        tl.store(slots + token, zeros - 1, mask=mask)
        tl.store(token_fields + token, zeros, mask=mask)
        tl.store(token_fields + stride + token, zeros, mask=mask)
        tl.store(token_fields + 2 * stride + token, zeros, mask=mask)


@triton.jit
def blocks_of(table, words, first, last, column, mask):
    """Block ids at columns of a row's table; those from ``first`` up to ``last`` are ``words``."""
    is_new = (column >= first) & (column < last)
    block = tl.load(table + column, mask=mask & (is_new == 0), other=0)
    return block + tl.load(words + column - first, mask=mask & is_new, other=0)


@triton.jit
def fill_tokens(token_fields, ids, words, fresh, stride, token, position, place, mask):
    """Ids, positions and rows of tokens; a row's first ``fresh`` ids are in ``words``."""
    is_fresh = position < fresh
    found = tl.load(ids + position, mask=mask & (is_fresh == 0), other=0)
    found += tl.load(words + position, mask=mask & is_fresh, other=0)
    tl.store(token_fields + token, found.to(tl.int64), mask=mask)
    tl.store(token_fields + stride + token, position.to(tl.int64), mask=mask)
    places = tl.zeros_like(position) + place
    tl.store(token_fields + 2 * stride + token, places.to(tl.int64), mask=mask)


@triton.jit
def store_words(target, words, begin, end, step, BLOCK: tl.constexpr):
    """Write words to the same places of ``target``, from ``begin`` on."""
    for at in range(begin, end, step):
        place = at + tl.arange(0, BLOCK)
        tl.store(
            target + place, tl.load(words + place, mask=place < end, other=0), mask=place < end
        )


@triton.jit
def fill_sample(row_fields, packed, field_stride, columns, ids_length, place, samples):
    """Where the logits of a sample come from, and where it goes."""
    is_sample = place < samples
    source = tl.load(packed + 3 * columns + place, mask=is_sample, other=0)
    row = tl.load(packed + source, mask=is_sample, other=0).to(tl.int64)
    start = tl.load(packed + columns + source, mask=is_sample, other=0)
    end = tl.load(packed + columns + source + 1, mask=is_sample, other=1)
    computed = tl.load(packed + 2 * columns + source, mask=is_sample, other=0)
    target = tl.where(is_sample, row * ids_length + computed + end - start, 0)
    tl.store(row_fields + 2 * field_stride + place, (end - 1).to(tl.int64))
    tl.store(row_fields + 3 * field_stride + place, target)


@launched
@triton.jit(
    do_not_specialize=["rows", "tokens", "samples", "padded_rows", "padded_tokens", "num_blocks"]
)
def step_inputs_kernel(
    packed,
    token_ids,
    block_tables,
    token_fields,
    row_fields,
    step_tables,
    rows,
    tokens,
    samples,
    padded_rows,
    padded_tokens,
    num_blocks,
    ids_stride,
    ids_length,
    group_stride,
    table_stride,
    token_field_stride,
    row_field_stride,
    columns,
    step_group_stride,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (i, c, g) does what belongs to row i of the step and KV group g, in BLOCKs of which
    the c-th is its first; group 0 also does what the groups share. The row behind the last one is
    the padding tokens. ``columns`` is the size of a packed field.
    """
    place = tl.program_id(0)
    begin = tl.program_id(1) * BLOCK
    step = tl.num_programs(1) * BLOCK
    group = tl.program_id(2)
    slots = token_fields + (3 + group) * token_field_stride
    if place == padded_rows:
        stride = token_field_stride
        pad_tokens(token_fields, slots, stride, tokens, padded_tokens, begin, step, BLOCK)
        tl.store(row_fields + padded_rows, tokens)
        return

    is_row = place < rows
    row = tl.load(packed + place, mask=is_row, other=0).to(tl.int64)
    start = tl.load(packed + columns + place, mask=is_row, other=0)
    end = tl.load(packed + columns + place + 1, mask=is_row, other=0)
    computed = tl.load(packed + 2 * columns + place, mask=is_row, other=0)
    length = computed + end - start
    fresh = tl.load(packed + 4 * columns + place, mask=is_row, other=0)
    id_words = packed + tl.load(packed + 5 * columns + place, mask=is_row, other=0)
    ids = token_ids + row * ids_stride
    spans = packed + (6 + group) * columns + place
    group_columns = tl.num_programs(2) * columns
    first = tl.load(spans, mask=is_row, other=0)
    last = tl.load(spans + group_columns, mask=is_row, other=0)
    words = packed + tl.load(spans + 2 * group_columns, mask=is_row, other=0)
    table = block_tables + group * group_stride + row * table_stride

    held = (length + BLOCK_SIZE - 1) // BLOCK_SIZE
    step_table = step_tables + group * step_group_stride + place.to(tl.int64) * num_blocks
    for at in range(begin, num_blocks, step):
        column = at + tl.arange(0, BLOCK)
        block = blocks_of(table, words, first, last, column, column < held)
        tl.store(step_table + column, block, mask=column < num_blocks)
    for at in range(start + begin, end, step):
        token = at + tl.arange(0, BLOCK)
        mask = token < end
        position = computed + token - start
        block = blocks_of(table, words, first, last, position // BLOCK_SIZE, mask).to(tl.int64)
        tl.store(slots + token, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=mask)
        if group == 0:
            fill_tokens(
                token_fields, ids, id_words, fresh, token_field_stride, token, position, place, mask
            )
    store_words(table, words - first, first + begin, last, step, BLOCK)
    if group == 0:
        store_words(ids, id_words, begin, fresh, step, BLOCK)
        if begin == 0:
            tl.store(row_fields + place, tl.where(is_row, start, tokens).to(tl.int64))
            tl.store(row_fields + row_field_stride + place, length.to(tl.int64))
            fill_sample(row_fields, packed, row_field_stride, columns, ids_length, place, samples)
