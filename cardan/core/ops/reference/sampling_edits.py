"""Changes of logits before sampling: penalties for repetition, and masks of allowed tokens."""

import torch
from torch import Tensor


def apply_penalties(
    logits: Tensor,
    prompt_mask: Tensor,
    output_counts: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """Penalise tokens that were seen before.

    A token of the prompt or the output has its logit divided by ``repetition`` where positive and
    multiplied where negative (CTRL, arXiv 1909.05858). A token that was output ``count`` times
    then loses ``count * frequency + presence`` (OpenAI API).

    Args:
        logits: [N, V].
        prompt_mask: [N, V] bool, tokens of the prompt.
        output_counts: [N, V] int32, how often each token was output.
        repetition: [N], 1 is off.
        presence: [N], 0 is off.
        frequency: [N], 0 is off.

    Returns:
        New logits [N, V]; -inf stays -inf.
    """
    output = output_counts > 0
    factor = repetition.to(logits.dtype)[:, None]
    repeated = torch.where(logits > 0, logits / factor, logits * factor)
    penalised = torch.where(prompt_mask | output, repeated, logits)
    penalised.sub_(output_counts * frequency.to(logits.dtype)[:, None])
    return penalised.sub_(output * presence.to(logits.dtype)[:, None])


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
