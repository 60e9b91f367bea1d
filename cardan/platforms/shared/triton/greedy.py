"""Launches of the search for the likeliest token, as ``greedy_tokens`` is defined.

Nothing that the kernels are compiled for depends on the size of the vocabulary, beyond whether it
is a multiple of 16: what the first check of an operation compiles serves every model.
"""

import torch
from torch import Tensor

from cardan.platforms.shared.triton.kernels.greedy import chunk_maxima_kernel, row_maxima_kernel
from cardan.platforms.shared.triton.rows import as_rows

# Logits that one program looks at, and the parts of them whose maxima it keeps: these tell
# ``choose_tokens`` where candidates are.
_CHUNK = 1024
_PARTS = 4
# Maxima that the program of a row looks at at once.
_BLOCK = 256


def greedy_tokens(logits: Tensor) -> Tensor:
    return _search(as_rows(logits), judge=False)[0]


def judged_tokens(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [N] int64 of logits [N, V]; [N] bool of the rows whose largest logit is NaN or
    infinite, where the token is 0; and the parts' maxima [N, parts] as their kernel leaves them.
    """
    return _search(rows, judge=True)


def _search(rows: Tensor, judge: bool) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, vocab_size = rows.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=rows.device)
    failed = torch.empty(num_rows, dtype=torch.bool, device=rows.device)
    num_chunks = -(-vocab_size // _CHUNK)
    num_maxima = num_chunks * _PARTS
    found = torch.empty(num_rows, num_maxima, dtype=torch.int64, device=rows.device)
    if not num_rows:
        return tokens, failed, found
    chunk_maxima_kernel[(num_rows, num_chunks)](
        rows, found, rows.stride(0), vocab_size, num_chunks, CHUNK=_CHUNK, PARTS=_PARTS
    )
    row_maxima_kernel[(num_rows,)](
        found,
        rows,
        tokens,
        failed,
        rows.stride(0),
        num_maxima,
        BLOCK=_BLOCK,
        JUDGE=judge,
        num_warps=1,
    )
    return tokens, failed, found
