"""Tables of log-probabilities: on the device first, read when somebody looks."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cardan.core.interfaces.kernels import Kernel
from cardan.core.types.step import Int64, LogprobsArrays

# Bound of the float32 copy that a long prompt's logits are worked through in.
_CHUNK_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class LogprobsTable:
    """Log-probabilities of one token for each of n rows, on the device.

    ``token_ids`` [n, 1 + k] int64 and ``logprobs`` [n, 1 + k] float32 start with the chosen token;
    ``ranks`` [n] int64 is its 1-based rank.
    """

    rows: Int64
    token_ids: Tensor
    logprobs: Tensor
    ranks: Tensor

    def arrays(self) -> LogprobsArrays:
        """All rows as positions; waits for the device."""
        return LogprobsArrays(
            token_ids=self.token_ids.cpu().numpy().astype(np.int32),
            logprobs=self.logprobs.cpu().numpy().astype(np.float32),
            ranks=self.ranks.cpu().numpy().astype(np.int32),
        )

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
    top_ids, top_logprobs, logprob, ranks = kernel(logits, token_ids, k)
    return LogprobsTable(
        rows=rows,
        token_ids=torch.cat((token_ids[:, None], top_ids), dim=1),
        logprobs=torch.cat((logprob[:, None], top_logprobs), dim=1),
        ranks=ranks,
    )


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
