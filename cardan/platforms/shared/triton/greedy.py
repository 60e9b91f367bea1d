"""Launches of the search for the likeliest token, as ``greedy_tokens`` is defined."""

import torch
from torch import Tensor

from cardan.platforms.shared.triton.kernels.greedy import chunk_maxima_kernel, row_maxima_kernel
from cardan.platforms.shared.triton.rows import as_rows, power_of_two

# Logits that one program looks at, and how many of them at once. Chunks are as short as reading at
# the full rate allows: their maxima tell ``choose_tokens`` where candidates are.
_CHUNK = 1024
_BLOCK = 1024


def greedy_tokens(logits: Tensor) -> Tensor:
    return _search(as_rows(logits), judge=False)[0]


def judged_tokens(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [N] int64 of logits [N, V]; [N] bool of the rows whose largest logit is NaN or
    infinite, where the token is 0; and the chunks' maxima [N, chunks] as their kernel leaves them.
    """
    return _search(rows, judge=True)


def _search(rows: Tensor, judge: bool) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, vocab_size = rows.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=rows.device)
    failed = torch.empty(num_rows, dtype=torch.bool, device=rows.device)
    num_chunks = -(-vocab_size // _CHUNK)
    found = torch.empty(num_rows, num_chunks, dtype=torch.int64, device=rows.device)
    if not num_rows:
        return tokens, failed, found
    chunk_maxima_kernel[(num_rows, num_chunks)](
        rows, found, rows.stride(0), vocab_size, num_chunks, CHUNK=_CHUNK, BLOCK=_BLOCK
    )
    row_maxima_kernel[(num_rows,)](
        found,
        rows,
        tokens,
        failed,
        rows.stride(0),
        num_chunks,
        CHUNKS=power_of_two(num_chunks),
        JUDGE=judge,
        num_warps=1,
    )
    return tokens, failed, found
