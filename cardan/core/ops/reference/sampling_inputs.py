"""Random inputs for the sampling operations.

Inputs keep clear of decisions that turn on the last bit: a provider may round otherwise than the
body and still must pick the same tokens.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cardan.core.interfaces.kernels import Attributes, Case
from cardan.core.ops.reference.sampling_filters import apply_min_p_top_k_top_p

# One size that fills blocks of any usual width, and one that fills none.
_SHAPES = ((3, 1024), (5, 1337))
# Temperature, top-k, tokens that top-p keeps, and min-p.
_CHOICES = (
    (None, 0, 0, 0.0),
    (0.5, 0, 0, 0.0),
    (0.7, 0, 12, 0.0),
    (2.0, 40, 0, 0.0),
    (None, 0, 0, 0.013),
    (0.7, 9, 5, 0.1),
)


def _attributes(dtype: torch.dtype, vocab_size: int) -> Attributes:
    return {"dtype": str(dtype).removeprefix("torch."), "vocab_size": vocab_size}


def _logits(dtype: torch.dtype, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Distinct multiples of 1/32 in random order, about normal in spread; one row has a mask."""
    num_rows, vocab_size = shape
    steps = torch.stack([torch.randperm(vocab_size, generator=generator) for _ in range(num_rows)])
    logits = ((steps - vocab_size // 2) / 32.0).to(torch.float32)
    logits[0, ::3] = -torch.inf
    return logits.to(dtype)


def _between(logits: Tensor, top_k: int, share: int) -> Tensor:
    """A top-p [N] that keeps ``share`` tokens of what top-k leaves of float64 logits [N, V]: half
    way between two sums, so that rounding cannot move the cut."""
    ranked = logits.sort(-1, descending=True)[0][:, : top_k or logits.shape[1]]
    mass = ranked.softmax(-1).cumsum(-1)
    return (mass[:, share - 1] + mass[:, share]) / 2


def _middle(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Numbers [N] in the middle of the interval of some token of float64 logits [N, V].

    Squares make tokens of very short intervals too rare to be met.
    """
    probabilities = logits.softmax(-1)
    tokens = probabilities.square().multinomial(1, generator=generator)
    ends = probabilities.cumsum(-1).gather(1, tokens)
    return (ends - probabilities.gather(1, tokens) / 2)[:, 0]


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
    """Inputs of ``apply_penalties``, for all rows and some; the last one has nothing to penalise.

    The tables have a slot more than there are rows.
    """
    generator = torch.Generator().manual_seed(seed)
    cases = []
    for shape, index in ((_SHAPES[0], None), (_SHAPES[1], [4, 0, 2])):
        num_rows, vocab_size = shape if index is None else (len(index), shape[1])
        tables = (num_rows + 1, vocab_size)
        prompt = torch.rand(tables, generator=generator) < 0.1
        counts = torch.randint(-8, 4, tables, generator=generator, dtype=torch.int32).clamp(min=0)
        slots = torch.randperm(num_rows + 1, generator=generator)[:num_rows]
        prompt[slots[-1]] = False
        counts[slots[-1]] = 0
        low, high = torch.tensor([[0.5, 2.0], [-2.0, 2.0], [-2.0, 2.0]]).T[:, :, None]
        factors = low + torch.rand(3, num_rows, generator=generator) * (high - low)
        places = None if index is None else torch.tensor(index, device=device)
        history = (tensor.to(device) for tensor in (slots, prompt, counts, factors))
        args = (_logits(dtype, shape, generator).to(device), places, *history)
        cases.append(Case(args, _attributes(dtype, vocab_size)))
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
                top_p = _between(logits.double(), top_k, share)
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
        args = (logits, _middle(logits.double(), generator))
        cases.append(Case(tuple(a.to(device) for a in args), _attributes(dtype, shape[1])))
    return cases


def make_choose(dtype: Any, device: Any, seed: int) -> Sequence[Case]:
    """Inputs of ``choose_tokens``: greedy rows, drawn ones with each setting, and faulty ones."""
    generator = torch.Generator().manual_seed(seed)
    cases = []
    for temperature, top_k, share, min_p in _CHOICES:
        for shape, index in ((_SHAPES[0], None), (_SHAPES[1], [3, 0])):
            logits = _logits(dtype, shape, generator)
            if index is not None:
                logits[1, 5], logits[2], logits[4] = torch.nan, -torch.inf, torch.inf
            drawn = logits.double() if index is None else logits.double()[index]
            size = len(drawn)
            tempered = (drawn - drawn.amax(-1, keepdim=True)) / (temperature or 1.0)
            ranks = shares = None
            if top_k or share or min_p:
                wide = torch.ones(size, dtype=torch.float64)
                top_p = _between(tempered, top_k, share) if share else wide
                ranks, shares = torch.full((size,), top_k), torch.stack((top_p, wide * min_p))
                tempered = apply_min_p_top_k_top_p(tempered, ranks, *shares)
            heat = None if temperature is None else torch.full((size,), temperature)
            places = None if index is None else torch.tensor(index)
            uniform = _middle(tempered, generator)
            args = _moved((logits, places, uniform, heat, ranks, shares), device)
            cases.append(Case(args, _attributes(dtype, shape[1])))
    for shape in _SHAPES:
        args = _moved((_logits(dtype, shape, generator), *[None] * 5), device)
        cases.append(Case(args, _attributes(dtype, shape[1])))
    return cases


def _moved(args: Sequence[Tensor | None], device: Any) -> tuple[Tensor | None, ...]:
    return tuple(None if arg is None else arg.to(device) for arg in args)


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
