"""Random inputs for the sampling operations.

Inputs keep clear of decisions that turn on the last bit: a provider may round otherwise than the
body and still must pick the same tokens.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cardan.core.interfaces.kernels import Attributes, Case

# One size that fills blocks of any usual width, and one that fills none.
_SHAPES = ((3, 1024), (5, 1337))


def _attributes(dtype: torch.dtype, vocab_size: int) -> Attributes:
    return {"dtype": str(dtype).removeprefix("torch."), "vocab_size": vocab_size}


def _logits(dtype: torch.dtype, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Distinct multiples of 1/32 in random order, about normal in spread; one row has a mask."""
    num_rows, vocab_size = shape
    steps = torch.stack([torch.randperm(vocab_size, generator=generator) for _ in range(num_rows)])
    logits = ((steps - vocab_size // 2) / 32.0).to(torch.float32)
    logits[0, ::3] = -torch.inf
    return logits.to(dtype)


def make_logits(dtype: Any, device: Any, seed: int) -> Sequence[Case]:
    """Inputs of ``greedy_tokens``, ties included."""
    generator = torch.Generator().manual_seed(seed)
    cases = []
    for shape in _SHAPES:
        logits = _logits(dtype, shape, generator)
        logits[1, [7, shape[1] - 1]] = 1000.0
        cases.append(Case((logits.to(device),), _attributes(dtype, shape[1])))
    return cases


def make_penalties(dtype: Any, device: Any, seed: int) -> Sequence[Case]:
    """Inputs of ``apply_penalties``; the last row has nothing to penalise."""
    generator = torch.Generator().manual_seed(seed)
    cases = []
    for shape in _SHAPES:
        num_rows = shape[0]
        prompt = torch.rand(shape, generator=generator) < 0.1
        counts = torch.randint(-8, 4, shape, generator=generator, dtype=torch.int32).clamp(min=0)
        prompt[-1] = False
        counts[-1] = 0
        repetition, presence, frequency = (
            low + torch.rand(num_rows, generator=generator) * (high - low)
            for low, high in ((0.5, 2.0), (-2.0, 2.0), (-2.0, 2.0))
        )
        args = (_logits(dtype, shape, generator), prompt, counts, repetition, presence, frequency)
        cases.append(Case(tuple(a.to(device) for a in args), _attributes(dtype, shape[1])))
    return cases


def make_token_mask(dtype: Any, device: Any, seed: int) -> Sequence[Case]:
    """Inputs of ``apply_token_mask``; one row allows all tokens, one a single token."""
    generator = torch.Generator().manual_seed(seed)
    cases = []
    for shape in _SHAPES:
        words = -(-shape[1] // 32)
        bits = torch.randint(-(2**31), 2**31, (shape[0], words), generator=generator)
        bits[0] = -1
        bits[1] = 0
        bits[1, 2] = 1 << 5
        args = (_logits(dtype, shape, generator), bits.to(torch.int32))
        cases.append(Case(tuple(a.to(device) for a in args), _attributes(dtype, shape[1])))
    return cases


def make_filters(dtype: Any, device: Any, seed: int) -> Sequence[Case]:
    """Inputs of ``apply_min_p_top_k_top_p``: each filter alone, pairs, all, and none."""
    generator = torch.Generator().manual_seed(seed)
    cases = []
    for top_k, min_p, share in ((0, 0.0, 12), (40, 0.0, 0), (0, 0.013, 0), (9, 0.1, 5), (0, 0, 0)):
        for shape in _SHAPES:
            logits = _logits(dtype, shape, generator)
            num_rows = shape[0]
            top_p = torch.ones(num_rows, dtype=torch.float64)
            if share:
                ranked = logits.double().sort(-1, descending=True)[0][:, : top_k or shape[1]]
                mass = ranked.softmax(-1).cumsum(-1)
                # Half way between two sums, so that rounding cannot move the cut.
                top_p = (mass[:, share - 1] + mass[:, share]) / 2
            args = (
                logits,
                torch.full((num_rows,), top_k, dtype=torch.int64),
                top_p,
                torch.full((num_rows,), min_p, dtype=torch.float64),
            )
            cases.append(Case(tuple(a.to(device) for a in args), _attributes(dtype, shape[1])))
    return cases


def make_sample(dtype: Any, device: Any, seed: int) -> Sequence[Case]:
    """Inputs of ``sample_tokens``: each number lies in the middle of its token's interval."""
    generator = torch.Generator().manual_seed(seed)
    cases = []
    for shape in _SHAPES:
        logits = _logits(dtype, shape, generator)
        probabilities = logits.double().softmax(-1)
        tokens = probabilities.multinomial(1, generator=generator)
        ends = probabilities.cumsum(-1).gather(1, tokens)
        uniform = (ends - probabilities.gather(1, tokens) / 2)[:, 0]
        args = (logits, uniform)
        cases.append(Case(tuple(a.to(device) for a in args), _attributes(dtype, shape[1])))
    return cases


def make_logprobs(dtype: Any, device: Any, seed: int) -> Sequence[Case]:
    """Inputs of ``token_logprobs`` for tables of no, one, few and all tokens."""
    generator = torch.Generator().manual_seed(seed)
    cases = []
    for shape in _SHAPES:
        for k in (0, 1, 20, shape[1]):
            logits = _logits(dtype, shape, generator)
            tokens = torch.randint(0, shape[1], (shape[0],), generator=generator)
            args = (logits.to(device), tokens.to(device), k)
            cases.append(Case(args, {**_attributes(dtype, shape[1]), "k": k}))
    return cases
