"""Tables of log-probabilities: on the device first, read when somebody looks."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from cardan.core.interfaces.kernels import Kernel
from cardan.core.types.step import Int64, LogprobsArrays

# Bound of the float32 copy that a long prompt's logits are worked through in.
_CHUNK_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class LogprobsTable:
    """Log-probabilities of one token for each of n rows, on the device.

    ``token_ids`` [n] int64 are the chosen tokens, ``logprobs`` [n] float32 theirs and ``ranks``
    [n] int64 their 1-based ranks; ``top_ids`` and ``top_logprobs`` [n, k] are the likeliest ones.
    """

    rows: Int64
    token_ids: Tensor
    logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_logprobs: Tensor

    def arrays(self) -> LogprobsArrays:
        """All rows as positions, the chosen token first; waits for the device."""
        size = (self.top_ids.shape[0], 1 + self.top_ids.shape[1])
        token_ids, logprobs = np.empty(size, np.int32), np.empty(size, np.float32)
        token_ids[:, 0] = self.token_ids.cpu().numpy()
        token_ids[:, 1:] = self.top_ids.cpu().numpy()
        logprobs[:, 0] = self.logprobs.cpu().numpy()
        logprobs[:, 1:] = self.top_logprobs.cpu().numpy()
        return LogprobsArrays(token_ids, logprobs, self.ranks.cpu().numpy().astype(np.int32))

    def by_row(self) -> dict[int, LogprobsArrays]:
        """One position for each row; waits for the device."""
        whole = self.arrays()
        return {
            row: LogprobsArrays(
                whole.token_ids[i : i + 1], whole.logprobs[i : i + 1], whole.ranks[i : i + 1]
            )
            for i, row in enumerate(self.rows.tolist())
        }


def logprobs_table(
    kernel: Kernel, rows: Int64, logits: Tensor, token_ids: Tensor, k: int
) -> LogprobsTable:
    """Table of tokens [n] and the k likeliest ones under float32 logits [n, V]."""
    top_ids, top_logprobs, logprobs, ranks = kernel(logits, token_ids, k)
    return LogprobsTable(rows, token_ids, logprobs, ranks, top_ids, top_logprobs)


def chunked_logprobs(kernel: Kernel, logits: Tensor, token_ids: Tensor, k: int) -> LogprobsArrays:
    """Table over positions: logits [P, V] of any float dtype, tokens [P] int64.

    Float32 temporaries stay within a fixed number of bytes whatever P is.
    """
    num_positions, vocab_size = logits.shape
    size = max(1, _CHUNK_BYTES // (4 * vocab_size))
    parts = []
    for start in range(0, num_positions, size):
        part = slice(start, start + size)
        rows = np.arange(*part.indices(num_positions))
        parts.append(
            logprobs_table(kernel, rows, logits[part].float(), token_ids[part], k).arrays()
        )
    if not parts:
        empty = (0, 1 + k)
        return LogprobsArrays(
            np.empty(empty, np.int32), np.empty(empty, np.float32), np.empty(0, np.int32)
        )
    return LogprobsArrays(
        token_ids=np.concatenate([part.token_ids for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        ranks=np.concatenate([part.ranks for part in parts]),
    )
