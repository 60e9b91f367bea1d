"""Triton's choice of tokens under the interpreter against the float64 definition, on other inputs
than the operation's own."""

import pytest
import torch
from triton_interpreter import interpreted, interpreting

from cardan.core.ops.catalogue import CATALOGUE
from cardan.core.ops.compare import reference_kernel

OPS = {op.name: op for op in CATALOGUE}
DEFINITION = reference_kernel(OPS["choose_tokens"], OPS)


def logits_of(kind, size):
    logits = torch.randn(2, size, generator=torch.Generator().manual_seed(size)) * 3
    if kind == "flat":
        return logits * 0.02
    if kind == "ties":
        return (logits * 0.5).round()
    if kind == "masked":
        allowed = torch.zeros(2, size, dtype=torch.bool)
        allowed[:, ::257] = True
        return logits.masked_fill(~allowed, -torch.inf)
    if kind == "equal":
        return torch.full((2, size), -2.5)
    return logits


def chosen(choose, logits, numbers, heat, k, shares):
    num_rows = len(logits)
    uniform = torch.tensor(numbers, dtype=torch.float64)
    temperature = None if heat is None else torch.full((num_rows,), heat)
    top_k = torch.full((num_rows,), k)
    wide = torch.tensor(shares, dtype=torch.float64)[:, None].expand(2, num_rows)
    return choose(logits, None, uniform, temperature, top_k, wide)[0].tolist()


@pytest.mark.parametrize(
    ("heat", "k", "shares"),
    [
        (None, 0, (0.9, 0.0)),  # top-p without top-k
        (1.5, 70, (0.8, 0.05)),  # a top-k beyond the maxima of parts
        (0.7, 30, (1.0, 0.0)),
    ],
)
@pytest.mark.parametrize("kind", ["normal", "flat", "ties", "masked", "equal"])
def test_cuts(kind, heat, k, shares):
    """Few tokens are left, or more than are copied; more are allowed than there are."""
    choose = interpreted("choose").choose_tokens
    logits = logits_of(kind, 6000)
    with interpreting():
        found = chosen(choose, logits, [0.12345, 0.98765], heat, k, shares)
    assert found == chosen(DEFINITION, logits.double(), [0.12345, 0.98765], heat, k, shares)


def test_shares_without_a_rank():
    """Each of the optional settings may be there alone."""
    choose = interpreted("choose").choose_tokens
    logits = logits_of("normal", 300)
    uniform = torch.tensor([0.3, 0.6], dtype=torch.float64)
    shares = torch.tensor([[0.5, 0.6], [0.0, 0.1]], dtype=torch.float64)
    zeros = torch.zeros(2, dtype=torch.int64)
    with interpreting():
        found = choose(logits, None, uniform, None, None, shares)[0]
    truth = DEFINITION(logits.double(), None, uniform, None, zeros, shares)[0]
    assert torch.equal(found, truth)


def test_a_share_that_ends_between_equal_tokens():
    """The sums are exact here, so the definition's count is the only right one."""
    choose = interpreted("choose").choose_tokens
    logits = torch.zeros(1, 100)
    for share, count in ((0.07, 8), (0.55, 56), (0.25, 25), (0.29, 29)):
        shares = (share, 0.0)
        with interpreting():
            last = chosen(choose, logits, [0.9999999], None, 0, shares)
        assert last == chosen(DEFINITION, logits.double(), [0.9999999], None, 0, shares)
        assert last == [count - 1]


def test_min_p_at_its_bound():
    """A token exactly as probable as min-p asks is left."""
    choose = interpreted("choose").choose_tokens
    for share in (0.5, 0.1, 0.013):
        bound = torch.tensor(share, dtype=torch.float64).log().to(torch.float32)
        logits = torch.full((1, 64), -50.0)
        logits[0, 3], logits[0, 60] = 0.0, bound
        with interpreting():
            assert chosen(choose, logits, [0.999999], None, 0, (1.0, share)) == [60]
        logits[0, 60] = torch.nextafter(bound, torch.tensor(-1e9))
        with interpreting():
            assert chosen(choose, logits, [0.999999], None, 0, (1.0, share)) == [3]
