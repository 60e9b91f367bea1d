"""Mixtures of experts: which experts a token goes to, and what they make of it."""

import torch
from torch import Tensor
from torch.nn import functional

from cardan.core.ops.reference.activation import silu_and_mul


def route_experts(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """The ``top_k`` likeliest experts of each token, likeliest first, and their weights.

    Weights are the softmax of logits [T, E] over all experts; ``renormalize``: over the chosen
    ones, so that they add up to 1. Of equal logits the lower id is first. Computed in (at least)
    float32. Attributes of use: ``dtype`` (of the logits), ``num_experts`` (E), ``top_k``.

    Returns:
        Ids [T, top_k] int32, and weights [T, top_k] float32.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    ordered, ids = wide.sort(dim=-1, descending=True, stable=True)
    chosen = ordered[:, :top_k]
    if renormalize:
        weights = chosen.softmax(-1)
    else:
        weights = (chosen - wide.logsumexp(-1, keepdim=True)).exp()
    return ids[:, :top_k].to(torch.int32), weights


def expert_mlp(x: Tensor, experts: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of what the chosen experts, gated MLPs, make of each row of x [T, H].

    ``experts`` [E, 3 * I * H], in x's dtype, holds for each expert its gate and up projections
    [2 * I, H] and then its down projection [H, I], row by row; an expert gives
    down(silu(gate(x)) * up(x)), where the product is rounded to x's dtype. ``expert_ids`` [T, k]
    int32 lie in [0, E) and differ within a row; ``weights`` [T, k] are float32. Sums are at least
    float32, in the order of ``expert_ids``, and are rounded once: [T, H].

    Attributes of use: ``dtype``, ``num_experts`` (E), ``top_k`` (k), ``hidden`` (H),
    ``intermediate`` (I).
    """
    hidden = x.shape[-1]
    inner = experts.shape[1] // (3 * hidden)
    parts = x.new_zeros((*expert_ids.shape, hidden))
    # Numbers are taken one by one, because that is refused where work is captured to be repeated.
    for expert in [int(found) for found in expert_ids.unique()]:
        gate_up, down = experts[expert].split([2 * inner * hidden, inner * hidden])
        tokens, places = (expert_ids == expert).nonzero(as_tuple=True)
        product = silu_and_mul(functional.linear(x[tokens], gate_up.view(2 * inner, hidden)))
        parts[tokens, places] = functional.linear(product, down.view(hidden, inner))
    wide = torch.promote_types(x.dtype, torch.float32)
    total = torch.zeros(x.shape, dtype=wide, device=x.device)
    for place in range(expert_ids.shape[1]):
        total += parts[:, place].to(wide) * weights[:, place, None]
    return total.to(x.dtype)
