"""Everything that a step's tensors hold, from the rows and what changed of them."""

import torch
from torch import Tensor

from cardan.core.ops.packed_step import (
    NUM_GROUP_FIELDS,
    NUM_ROW_FIELDS,
    StepSizes,
    first_staged_word,
)


def step_inputs(
    packed: Tensor,
    token_ids: Tensor,
    block_tables: Tensor,
    token_fields: Tensor,
    row_fields: Tensor,
    step_tables: Tensor,
    sizes: StepSizes,
) -> None:
    """Bring the rows up to date with a step's changes, then fill the step's tensors from them.

    Padding tokens have id, position and row 0 and slot -1; padding rows have no tokens, no context
    and a table of zeros; places past the samples are 0. What lies past the sizes is left alone.
    Nothing here waits for the device.

    Args:
        packed: [W] int32, as ``PackedStep`` says; its fields have the size C of ``row_fields``.
        token_ids: [rows, length] int32, the tokens of all rows; written where rows are new.
        block_tables: [G, rows, blocks] int32, the block tables of all rows; written where the step
            changes them.
        token_fields: [3 + G, >= padded tokens] int64, written: ids, positions, the row in the step
            of each token, and for each group the slots ``block_id * block_size + offset``.
        row_fields: [4, C] int64, written: ``query_start_loc``, ``seq_lens``; the token that gives
            each sample's logits, and where that sample goes in ``token_ids``, flattened.
        step_tables: [G, N] int32, written: the block tables of the step's rows, [padded rows,
            blocks] without gaps; 0 past the blocks of a row.
        sizes: a tuple, as ``StepSizes`` says.
    """
    num_rows, num_tokens, num_samples, _, _, num_blocks, size = sizes[:7]
    new_tokens, new_blocks = sizes[7:]
    device, num_groups, columns = packed.device, len(block_tables), row_fields.shape[1]
    fields = packed[: first_staged_word(num_groups, columns)].view(-1, columns)
    fields = fields[:, : num_rows + 1].to(torch.int64)
    starts, ends = fields[1, :-1], fields[1, 1:]
    rows, _, computed, samples = fields[:4, :-1]
    lengths = computed + ends - starts
    if new_tokens or new_blocks:
        staged = packed[first_staged_word(num_groups, columns) :]
        _store_changes(staged, token_ids, block_tables, fields[:, :-1], sizes)

    token = torch.arange(num_tokens, device=device)
    token_rows = torch.searchsorted(ends, token, right=True)
    positions = token + (computed - starts)[token_rows]
    ids = token_ids[rows[token_rows], positions].to(torch.int64)
    token_fields[:3, :num_tokens] = torch.stack((ids, positions, token_rows))
    held = torch.arange(num_blocks, device=device) < -(-lengths // size)[:, None]
    tables = block_tables[:, rows, :num_blocks] * held
    blocks = tables[:, token_rows, positions // size].to(torch.int64)
    token_fields[3:, :num_tokens] = blocks * size + positions % size
    step_tables[:, : num_rows * num_blocks] = tables.flatten(1)

    row_fields[0, : num_rows + 1] = fields[1]
    row_fields[1, :num_rows] = lengths
    samples = samples[:num_samples]
    row_fields[2, :num_samples] = ends[samples] - 1
    row_fields[3, :num_samples] = rows[samples] * token_ids.shape[1] + lengths[samples]
    _pad(token_fields, row_fields, step_tables, sizes)


def _pad(token_fields: Tensor, row_fields: Tensor, step_tables: Tensor, sizes: StepSizes) -> None:
    num_rows, num_tokens, num_samples, padded_rows, padded_tokens, num_blocks = sizes[:6]
    row_fields[2:, num_samples:padded_rows].zero_()
    if padded_tokens > num_tokens:
        token_fields[:3, num_tokens:padded_tokens].zero_()
        token_fields[3:, num_tokens:padded_tokens].fill_(-1)
    if padded_rows > num_rows:
        row_fields[0, num_rows + 1 : padded_rows + 1].fill_(num_tokens)
        row_fields[1, num_rows:padded_rows].zero_()
        step_tables[:, num_rows * num_blocks : padded_rows * num_blocks].zero_()


def _store_changes(
    staged: Tensor, token_ids: Tensor, block_tables: Tensor, fields: Tensor, sizes: StepSizes
) -> None:
    """Write the staged words to the rows; ``fields`` [..., R] int64."""
    *_, new_tokens, new_blocks = sizes
    rows = fields[0]
    if new_tokens:
        place, column = _targets(fields[4], torch.zeros_like(rows), new_tokens)
        token_ids[rows[place], column] = staged[:new_tokens]
    if new_blocks:
        # Each [G * R].
        first, end, _ = fields[NUM_ROW_FIELDS:].reshape(NUM_GROUP_FIELDS, -1)
        place, column = _targets(end - first, first, new_blocks)
        where = (place // len(rows), rows[place % len(rows)], column)
        block_tables[where] = staged[new_tokens : new_tokens + new_blocks]


def _targets(counts: Tensor, first: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Span and column of each of ``total`` words that fill spans of ``counts`` columns."""
    ends = counts.cumsum(0)
    word = torch.arange(total, device=counts.device)
    span = torch.searchsorted(ends, word, right=True)
    return span, word + (first + counts - ends)[span]
