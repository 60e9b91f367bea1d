"""Choosing tokens: the likeliest one, and one drawn from the distribution.

Both work in two levels, blocks of the vocabulary first and then inside one block, so that a row
costs one reduction over the vocabulary and no prefix sum over it.
"""

import torch
from torch import Tensor

from cardan.core.ops.reference.sampling_blocks import block_maxima, block_sums

# Tokens a block; a row of 49152 logits then has 192 block maxima or block sums.
BLOCK = 256


def greedy_tokens(logits: Tensor) -> Tensor:
    """The likeliest token of each row.

    Args:
        logits: [N, V].

    Returns:
        [N] int64. The lowest id wins a tie; NaN counts as the largest value, so that the caller
        finds it at the returned id.
    """
    num_rows, vocab_size = logits.shape
    maxima = block_maxima(logits, BLOCK)
    block = maxima.argmax(-1, keepdim=True)
    # Ids past the end repeat the last one; they lose the tie against its first occurrence.
    ids = (block * BLOCK + torch.arange(BLOCK, device=logits.device)).clamp(max=vocab_size - 1)
    return ids.gather(1, logits.gather(1, ids).argmax(-1, keepdim=True)).view(num_rows)


def sample_tokens(logits: Tensor, uniform: Tensor) -> Tensor:
    """A token of each row by inversion of its cumulative distribution, in order of ids.

    Sums over blocks are accumulated in the dtype of ``uniform``; the error of the distribution
    function stays below 1e-6 in all.

    Args:
        logits: [N, V]; -inf excludes a token.
        uniform: [N] float64 or float32 in [0, 1).

    Returns:
        [N] int64, never a token whose probability is zero. The token of a row that holds NaN or
        nothing finite is some id inside the vocabulary.
    """
    num_rows, vocab_size = logits.shape
    wide = uniform.dtype
    weights = logits.softmax(-1)
    ends = block_sums(weights, BLOCK, wide).cumsum(-1)
    # A product that rounds up to the whole mass would point behind the last token.
    mass = ends[:, -1:]
    target = torch.minimum(uniform[:, None] * mass, mass * (1 - torch.finfo(wide).eps))
    block = (ends <= target).sum(-1, keepdim=True).clamp(max=ends.shape[1] - 1)
    start = torch.where(block > 0, ends.gather(1, (block - 1).clamp(min=0)), 0.0)

    places = torch.arange(BLOCK, device=logits.device)
    ids = block * BLOCK + places
    inside = weights.gather(1, ids.clamp(max=vocab_size - 1)).masked_fill(ids >= vocab_size, 0.0)
    offset = (inside.cumsum(-1, dtype=wide) <= target - start).sum(-1, keepdim=True)
    # The block's own sum may be rounded otherwise than its prefix sums: stay on a possible token.
    last = torch.where(inside > 0, places, 0).amax(-1, keepdim=True)
    token = block * BLOCK + torch.minimum(offset, last)
    return token.clamp(max=vocab_size - 1).view(num_rows)
