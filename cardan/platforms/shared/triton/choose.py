"""From logits to tokens in three launches at most, without waiting for the device; arguments and
results as ``choose_tokens`` is defined."""

import torch
from torch import Tensor

from cardan.platforms.shared.triton.greedy import judged_tokens
from cardan.platforms.shared.triton.kernels.draw import draw_kernel
from cardan.platforms.shared.triton.rows import as_rows

# Logits that a program looks at at once, and its warps: as many as have room for what they count.
_BLOCK = 4096
_WARPS = 16
# Candidates among which a cut is searched apart; more are searched where they lie.
_ROOM = 2048
# Maxima of parts of the vocabulary that a program can order.
_PLACES = 2048


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
    num_drawn = len(uniform)
    few_logits = torch.empty(num_drawn, _ROOM, dtype=rows.dtype, device=rows.device)
    few_ids = torch.empty(num_drawn, _ROOM, dtype=torch.int32, device=rows.device)
    # Absent tensors are not read; others of their dtypes stand in their places.
    draw_kernel[(num_drawn,)](
        rows,
        maxima,
        few_logits,
        few_ids,
        tokens if index is None else index,
        uniform,
        rows if temperature is None else temperature,
        tokens if top_k is None else top_k,
        uniform if shares is None else shares.contiguous(),
        tokens,
        failed,
        rows.stride(0),
        rows.shape[1],
        maxima.shape[1],
        int(index is not None),
        int(temperature is not None),
        int(top_k is not None),
        int(shares is not None),
        PLACES=_PLACES,
        ROOM=_ROOM,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )
    return tokens, failed
