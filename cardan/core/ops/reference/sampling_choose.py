"""The whole way from edited logits to tokens, as one operation."""

from collections.abc import Mapping

import torch
from torch import Tensor

from cardan.core.interfaces.kernels import Kernel


def choose_tokens(
    parts: Mapping[str, Kernel],
    logits: Tensor,
    index: Tensor | None,
    uniform: Tensor | None,
    temperature: Tensor | None,
    top_k: Tensor | None,
    shares: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The likeliest token of each row, or for the rows at ``index`` one drawn from what temperature
    and truncation leave.

    A drawn row is tempered as (logits - their largest) / temperature, so that a low temperature
    cannot overflow; then truncated as in ``apply_min_p_top_k_top_p``; then drawn from as in
    ``sample_tokens``.

    Args:
        logits: [N, V] float32; -inf excludes a token.
        index: [M] int64, distinct rows that are drawn; None stands for all of them in order.
        uniform: [M] float64 or float32 in [0, 1); None: no row is drawn, and what follows is None.
        temperature: [M] float32, positive; None: 1.
        top_k: [M] int64, as in ``apply_min_p_top_k_top_p``.
        shares: [2, M] float64 or float32, top-p and min-p as there; no truncation where this and
            ``top_k`` are None.

    Returns:
        Tokens [N] int64, and [N] bool of the rows that have none, because their largest logit is
        NaN or infinite; their token is 0.
    """
    tokens = parts["greedy_tokens"](logits)
    failed = ~torch.isfinite(logits.gather(1, tokens[:, None])[:, 0])
    if uniform is not None:
        rows = logits if index is None else logits.index_select(0, index)
        if temperature is not None:
            rows = (rows - rows.amax(-1, keepdim=True)).div_(temperature[:, None])
        if shares is not None:
            rows = parts["apply_min_p_top_k_top_p"](rows, top_k, *shares)
        drawn = parts["sample_tokens"](rows, uniform)
        tokens = drawn if index is None else tokens.index_copy(0, index, drawn)
    return tokens.masked_fill(failed, 0), failed
