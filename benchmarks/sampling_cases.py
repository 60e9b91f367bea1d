"""Choices of tokens from vocabularies of real size, for the correctness rows of ``gpu.py``."""

import torch

from cardan.core.interfaces.kernels import Case

# Vocabulary, spread of logits, temperature, top-k, top-p, min-p: cuts among few tokens, among many,
# beyond what chunks' maxima bound, and none.
SETTINGS = (
    (151936, 3.0, None, 0, 0.95, 0.0),
    (151936, 0.05, 1.5, 0, 0.9, 0.0),
    (151936, 3.0, 0.8, 50, 0.95, 0.0),
    (128256, 6.0, 0.3, 0, 0.999, 0.02),
    (50257, 1.0, 0.7, 700, 0.5, 0.0),
    (262208, 3.0, 1.0, 0, 1.0, 0.1),
)


def sampling_cases(device, seed):
    """A case for each of SETTINGS; logits as bfloat16 rounds them, so that many tie, and one row
    with few tokens allowed."""
    generator = torch.Generator().manual_seed(seed)
    cases = []
    for vocab_size, spread, heat, k, top_p, min_p in SETTINGS:
        logits = (torch.randn(4, vocab_size, generator=generator) * spread).bfloat16().float()
        logits[3, torch.rand(vocab_size, generator=generator) < 0.9995] = -torch.inf
        logits[3, 7] = 0.0
        shares = torch.tensor([[top_p], [min_p]], dtype=torch.float64).repeat(1, 4)
        args = (
            logits,
            None,
            torch.rand(4, dtype=torch.float64, generator=generator),
            None if heat is None else torch.full((4,), heat),
            torch.full((4,), k),
            shares,
        )
        moved = tuple(None if arg is None else arg.to(device) for arg in args)
        cases.append(Case(moved, {"dtype": "float32", "vocab_size": vocab_size}))
    return cases
