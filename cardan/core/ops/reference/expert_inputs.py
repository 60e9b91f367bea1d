"""Random inputs for the operations of mixtures of experts."""

from collections.abc import Sequence
from typing import Any

import torch

from cardan.core.interfaces.kernels import Attributes, Case

# tokens, experts, chosen, hidden, intermediate: the plain use, odd sizes, one token, many tokens
# for few experts, and a single expert.
_MIXTURES = (
    (5, 8, 2, 64, 32),
    (7, 6, 3, 50, 20),
    (1, 8, 4, 64, 48),
    (70, 4, 2, 32, 16),
    (3, 1, 1, 32, 16),
)


def make_route_experts(dtype: Any, device: Any, seed: int) -> Sequence[Case]:
    """With and without renormalisation; a row of equal logits, and one with a tie at the cut."""
    generator = torch.Generator().manual_seed(seed)
    cases = []
    for tokens, num_experts, top_k, renormalize in (
        (5, 128, 8, True),
        (3, 60, 4, False),
        (1, 8, 2, True),
        (4, 5, 5, False),
    ):
        logits = torch.randn(tokens, num_experts, generator=generator) * 2.0
        if tokens > 2:
            logits[0] = 0.5
            logits[1, :top_k] = logits[1].max()
            logits[1, -1] = logits[1, 0]
        attributes: Attributes = {
            "dtype": _name(dtype),
            "num_experts": num_experts,
            "top_k": top_k,
        }
        args = (logits.to(device=device, dtype=dtype), top_k, renormalize)
        cases.append(Case(args, attributes))
    return cases


def make_expert_mlp(dtype: Any, device: Any, seed: int) -> Sequence[Case]:
    """Outputs are of order 1."""
    generator = torch.Generator().manual_seed(seed)
    return [make_mixture(sizes, dtype, device, generator) for sizes in _MIXTURES]


def make_mixture(
    sizes: tuple[int, int, int, int, int], dtype: Any, device: Any, generator: torch.Generator
) -> Case:
    """Inputs of ``expert_mlp`` for tokens, experts, chosen ones, hidden and intermediate size."""
    tokens, num_experts, top_k, hidden, inner = sizes
    x = torch.randn(tokens, hidden, generator=generator)
    experts = torch.randn(num_experts, 3 * inner * hidden, generator=generator)
    experts[:, : 2 * inner * hidden] *= hidden**-0.5
    experts[:, 2 * inner * hidden :] *= inner**-0.5
    scores = torch.rand(tokens, num_experts, generator=generator)
    weights, ids = scores.softmax(-1).topk(top_k)
    args = (
        x.to(device=device, dtype=dtype),
        experts.to(device=device, dtype=dtype),
        ids.to(device=device, dtype=torch.int32),
        (weights / weights.sum(-1, keepdim=True)).to(device),
    )
    attributes: Attributes = {
        "dtype": _name(dtype),
        "num_experts": num_experts,
        "top_k": top_k,
        "hidden": hidden,
        "intermediate": inner,
    }
    return Case(args, attributes)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
