"""Truncation of distributions: min-p, top-k, top-p.

The whole vocabulary is sorted only for rows whose cut is not found among their likeliest tokens.
The choice depends on the data, so the body waits for the device; a platform that runs ahead of the
host serves the operation with a kernel of its own.
"""

import torch
from torch import Tensor

from cardan.core.ops.reference.sampling_blocks import block_sums, candidates

# Numbers of likeliest tokens among which a cut is searched before all of them are sorted.
WIDTHS = (128, 1024)
# Tokens a block of the sum over the vocabulary.
BLOCK = 256
# exp of this vanishes in any sum with 1; exp of smaller numbers is slow on some devices.
_LEAST_EXPONENT = -80.0


def apply_min_p_top_k_top_p(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Keep the likeliest tokens of each row.

    Top-k comes first and keeps all tokens that tie for place k. Top-p then keeps the smallest set
    of the likeliest tokens whose share of what top-k left is at least ``top_p``: one token at
    least, and of tokens that tie for the last place the lowest ids. Min-p drops tokens less
    probable than ``min_p`` times the likeliest one. This is the order of Hugging Face transformers.

    Sums of probabilities are accumulated in the dtype of ``top_p``.

    Args:
        logits: [N, V], already divided by the temperature.
        top_k: [N] int64; 0 is off.
        top_p: [N] float64 or float32 in (0, 1]; 1 is off.
        min_p: [N] in [0, 1]; 0 is off.

    Returns:
        New logits [N, V] with -inf for dropped tokens.
    """
    vocab_size = logits.shape[1]
    shifted = logits - logits.amax(-1, keepdim=True)
    lowest = min_p.log().to(logits.dtype)
    top_k = torch.where((top_k > 0) & (top_k < vocab_size), top_k, vocab_size)
    (index,) = ((top_k < vocab_size) | (top_p < 1)).nonzero(as_tuple=True)
    if not len(index):
        return logits.masked_fill(shifted < lowest[:, None], -torch.inf)

    ranked = shifted[index] if len(index) < len(logits) else shifted
    cutoff, limit = _cutoffs(ranked, top_k[index], top_p[index])
    lowest[index] = torch.maximum(lowest[index], cutoff)
    kept = logits.masked_fill(shifted < lowest[:, None], -torch.inf)

    above = (ranked >= cutoff[:, None]).sum(-1)
    (crowded,) = (above > limit).nonzero(as_tuple=True)
    if len(crowded):
        surplus = _surplus_ties(ranked[crowded], cutoff[crowded], limit[crowded])
        kept[index[crowded]] = kept[index[crowded]].masked_fill(surplus, -torch.inf)
    return kept


def _cutoffs(shifted: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Lowest logit kept by top-k and top-p [M], and how many tokens are kept at most [M]."""
    num_rows, vocab_size = shifted.shape
    cutoff = shifted.new_empty(num_rows)
    limit = top_k.new_empty(num_rows)
    pending = torch.arange(num_rows, device=shifted.device)
    widths = [width for width in WIDTHS if width < vocab_size]
    for width in (*widths, vocab_size):
        k = top_k[pending]
        reachable = (k <= width) | (k == vocab_size)
        if not bool(reachable.any()):
            continue
        rows = shifted[pending] if len(pending) < num_rows else shifted
        values, counts, found = _search(rows, width, k, top_p[pending])
        done = reachable & found
        cutoff[pending[done]] = values[done]
        limit[pending[done]] = counts[done]
        pending = pending[~done]
        if not len(pending):
            break
    return cutoff, limit


def _search(
    shifted: Tensor, width: int, top_k: Tensor, top_p: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Look for the cuts among the ``width`` likeliest tokens: lowest logit, number, found."""
    vocab_size = shifted.shape[1]
    whole = width == vocab_size
    if whole:
        values = shifted.sort(-1, descending=True).values
    else:
        values = candidates(shifted, width)[0].topk(width).values
    kth = values.gather(1, (top_k.clamp(max=width) - 1)[:, None])
    kth = kth.masked_fill((top_k == vocab_size)[:, None], -torch.inf)
    uses_top_p = top_p < 1
    if not bool(uses_top_p.any()):
        return kth[:, 0], torch.full_like(top_k, vocab_size), torch.ones_like(uses_top_p)

    weights = shifted.clamp(min=_LEAST_EXPONENT).exp_()
    if bool((top_k < vocab_size).any()):
        weights.masked_fill_(shifted < kth, 0.0)
    mass = block_sums(weights, BLOCK, top_p.dtype).sum(-1)
    reached = values.exp().cumsum(-1, dtype=top_p.dtype)
    number = (reached < (top_p * mass)[:, None]).sum(-1) + 1
    found = ~uses_top_p | (number <= width) | whole
    nth = values.gather(1, (number.clamp(max=width) - 1)[:, None])
    # Two roundings of one sum may ask for a token more than top-k left.
    cut = torch.where(uses_top_p[:, None], torch.maximum(nth, kth), kth)
    return cut[:, 0], torch.where(uses_top_p, number, vocab_size), found


def _surplus_ties(shifted: Tensor, cutoff: Tensor, limit: Tensor) -> Tensor:
    """Tokens [M, V] bool that tie for the last place and found it taken by lower ids."""
    tied = shifted == cutoff[:, None]
    places = limit - (shifted > cutoff[:, None]).sum(-1)
    return tied & (tied.cumsum(-1) > places[:, None])
