"""Log-probabilities of chosen tokens and of the likeliest ones."""

import torch
from torch import Tensor

from cardan.core.ops.reference.sampling_blocks import candidates, ranked


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
    normaliser = logits.logsumexp(-1, keepdim=True)
    chosen = logits.gather(1, token_ids[:, None])
    rank = (logits > chosen).sum(-1) + 1
    if k == 0:
        top_ids = torch.empty(len(logits), 0, dtype=torch.int64, device=logits.device)
    else:
        top_ids = ranked(*candidates(logits, k), k)
    top_logprobs = logits.gather(1, top_ids) - normaliser
    return top_ids, top_logprobs, (chosen - normaliser)[:, 0], rank
