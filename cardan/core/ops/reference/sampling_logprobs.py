"""Log-probabilities of chosen tokens and of the likeliest ones."""

import torch
from torch import Tensor

from cardan.core.ops.reference.sampling_blocks import block_sums, candidates, ranked

# Short enough that one thread sums a block, and one the sums of blocks.
_SUM_BLOCK = 256


def token_logprobs(
    logits: Tensor, token_ids: Tensor, k: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Natural logarithms of softmax(logits) at chosen tokens and at the k likeliest ones.

    Args:
        logits: [N, V] float32.
        token_ids: [N] int64.
        k: size of the table of likeliest tokens, 0 <= k <= V.

    Returns:
        ``top_ids`` [N, k] int64, likeliest first and the lowest id first among equals;
        ``top_logprobs`` [N, k]; ``logprob`` [N] of ``token_ids``; ``rank`` [N] int64 of
        ``token_ids``, 1 plus the number of strictly likelier tokens.
    """
    normaliser = _log_sum_exp(logits)
    chosen = logits.gather(1, token_ids[:, None])
    rank = (logits > chosen).sum(-1) + 1
    if k == 0:
        top_ids = torch.empty(len(logits), 0, dtype=torch.int64, device=logits.device)
    else:
        top_ids = ranked(*candidates(logits, k), k)
    top_logprobs = logits.gather(1, top_ids) - normaliser
    return top_ids, top_logprobs, (chosen - normaliser)[:, 0], rank


def _log_sum_exp(logits: Tensor) -> Tensor:
    """[N, V] -> [N, 1], by blocks: a lone row is summed in the same order as one of many."""
    largest = logits.amax(-1, keepdim=True)
    shift = torch.where(largest.isfinite(), largest, 0.0)
    sums = block_sums((logits - shift).exp_(), _SUM_BLOCK, logits.dtype)
    return sums.sum(-1, keepdim=True).log() + shift
