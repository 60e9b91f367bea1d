"""Changes of logits before sampling: penalties for repetition, and masks of allowed tokens."""

import torch
from torch import Tensor


def apply_penalties(
    logits: Tensor,
    index: Tensor | None,
    slots: Tensor,
    prompt_mask: Tensor,
    output_counts: Tensor,
    factors: Tensor,
) -> None:
    """Penalise tokens that were seen before, in place.

    A token of the prompt or the output has its logit divided by the repetition penalty where
    positive and multiplied where negative (CTRL, arXiv 1909.05858). A token that was output
    ``count`` times then loses ``count * frequency + presence`` (OpenAI API). -inf stays -inf.

    Args:
        logits: [N, V]; its rows at ``index`` are written.
        index: [M] int64, distinct; None stands for all rows in order.
        slots: [M] int64, where the history of each row is in the two tables.
        prompt_mask: [S, V] bool, tokens of the prompt.
        output_counts: [S, V] int32, how often each token was output.
        factors: [3, M] float32, penalties of repetition (1 is off), presence and frequency (0 is
            off).
    """
    counts = output_counts.index_select(0, slots)
    output = counts > 0
    repetition, presence, frequency = factors.to(logits.dtype)[:, :, None]
    rows = logits if index is None else logits.index_select(0, index)
    repeated = torch.where(rows > 0, rows / repetition, rows * repetition)
    penalised = torch.where(prompt_mask.index_select(0, slots) | output, repeated, rows)
    penalised.sub_(counts * frequency).sub_(output * presence)
    if index is None:
        logits.copy_(penalised)
    else:
        logits.index_copy_(0, index, penalised)


def apply_token_mask(logits: Tensor, bits: Tensor) -> Tensor:
    """Forbid all tokens but those whose bit is set.

    Args:
        logits: [N, V].
        bits: [N, ceil(V / 32)] int32; bit ``t % 32`` of word ``t // 32`` stands for token t.

    Returns:
        New logits [N, V] with -inf for forbidden tokens.
    """
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    allowed = ((bits[:, :, None] >> shifts) & 1).flatten(1)[:, : logits.shape[1]]
    return logits.masked_fill(allowed == 0, -torch.inf)
