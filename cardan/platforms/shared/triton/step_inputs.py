"""The launch that fills a step's tensors, as ``step_inputs`` is defined."""

from torch import Tensor

from cardan.platforms.shared.triton.kernels.step_inputs import step_inputs_kernel

# Elements that a program has in hand, and programs that share the work of a row and group.
_BLOCK = 512
_MOST_PROGRAMS = 16


def step_inputs(
    packed: Tensor,
    token_ids: Tensor,
    block_tables: Tensor,
    token_fields: Tensor,
    row_fields: Tensor,
    step_tables: Tensor,
    sizes: tuple[int, ...],
) -> None:
    rows, tokens, samples, num_rows, num_tokens, num_blocks, block_size, *_ = sizes
    programs = min(_MOST_PROGRAMS, -(-max(num_tokens, num_blocks) // _BLOCK))
    step_inputs_kernel[(num_rows + 1, programs, len(block_tables))](
        packed,
        token_ids,
        block_tables,
        token_fields,
        row_fields,
        step_tables,
        rows,
        tokens,
        samples,
        num_rows,
        num_tokens,
        num_blocks,
        token_ids.stride(0),
        token_ids.shape[1],
        *block_tables.stride()[:2],
        token_fields.stride(0),
        row_fields.stride(0),
        row_fields.shape[1],
        step_tables.stride(0),
        BLOCK_SIZE=block_size,
        BLOCK=_BLOCK,
    )
