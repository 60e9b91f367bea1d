"""From logits to tokens in three launches at most, without waiting for the device; arguments and
results as ``choose_tokens`` is defined."""

import torch
from torch import Tensor

from cardan.platforms.shared.triton.greedy import judged_tokens
from cardan.platforms.shared.triton.kernels.draw import draw_kernel
from cardan.platforms.shared.triton.rows import as_rows, power_of_two

# Logits that a program looks at once.
_BLOCK = 4096
# Candidates that top-k may leave for the search of its cut; more are searched where they lie.
_ROOM = 2048


def choose_tokens(
    logits: Tensor,
    index: Tensor | None,
    uniform: Tensor | None,
    temperature: Tensor | None,
    top_k: Tensor | None,
    shares: Tensor | None,
) -> tuple[Tensor, Tensor]:
    rows = as_rows(logits)
    tokens, failed, maxima = judged_tokens(rows)
    if uniform is None or not len(uniform):
        return tokens, failed
    if shares is not None and top_k is None:
        top_k = torch.zeros(len(uniform), dtype=torch.int64, device=rows.device)
    if top_k is not None and shares is None:
        shares = torch.ones(2, len(uniform), device=rows.device)
        shares[1] = 0.0
    num_drawn = len(uniform)
    few_logits = torch.empty(num_drawn, _ROOM, dtype=rows.dtype, device=rows.device)
    few_ids = torch.empty(num_drawn, _ROOM, dtype=torch.int32, device=rows.device)
    # Absent tensors are not read; others stand in their places.
    draw_kernel[(num_drawn,)](
        rows,
        maxima,
        few_logits,
        few_ids,
        tokens if index is None else index,
        uniform,
        rows if temperature is None else temperature,
        tokens if top_k is None else top_k,
        rows if shares is None else shares.contiguous(),
        tokens,
        failed,
        rows.stride(0),
        rows.shape[1],
        maxima.shape[1],
        HAS_INDEX=index is not None,
        HAS_TEMPERATURE=temperature is not None,
        HAS_CUTS=top_k is not None,
        BLOCKS=power_of_two(maxima.shape[1]),
        ROOM=_ROOM,
        BLOCK=min(_BLOCK, power_of_two(rows.shape[1])),
        num_warps=8,
    )
    return tokens, failed
