"""How the tokens of a step are shared: answers go first, then prompts, of which none takes all.

    | decoding rows, 1 each | prompts, at most the mixed budget                                |
                            | first long one: half | short ones, in order | new | long ones    |

A prompt is *long* when the step could not finish it even if it gave it all. The first long one gets
half, so that it always advances; short ones and new ones go before what longs would take beyond
that, so that none of them waits until a long one is through.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Rows = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Shares:
    """Tokens for running rows, decoding rows first.

    ``counts[i]`` of ``needs[i]`` tokens go to ``rows[i]``; ``rest`` is left for new sequences, and
    after them for the rows at ``long_places``, in that order.
    """

    rows: Rows
    needs: Int32
    counts: Int32
    rest: int
    long_places: Rows


def share_tokens(rows: Rows, needs: Int32, budget: int, mixed_budget: int | None) -> Shares:
    """Share ``budget`` tokens among ``rows``, which lack ``needs`` tokens and stand in order.

    ``mixed_budget``: most tokens for prompts in a step in which any row decodes.
    """
    is_prompt = needs > 1
    num_prompts = int(np.count_nonzero(is_prompt))
    if num_prompts:
        order = np.argsort(is_prompt, kind="stable")
        rows, needs = rows[order], needs[order]
    num_others = len(needs) - num_prompts
    counts = needs[:num_others]
    # Each of them needs one token or none.
    num_decoding = int(np.count_nonzero(counts))
    if num_decoding > budget:
        counts, num_decoding = _in_order(counts, budget), budget
    rest = budget - num_decoding
    if num_decoding and mixed_budget is not None:
        rest = min(rest, mixed_budget)
    if not num_prompts:
        return Shares(rows, needs, counts, rest, rows[:0])
    prompts = needs[num_others:]
    is_long = prompts > rest
    long_places = is_long.nonzero()[0]
    half = (rest + 1) // 2 if len(long_places) else 0
    given = _in_order(np.where(is_long, 0, prompts), rest - half)
    given[long_places[:1]] = half
    rest -= int(given.sum())
    counts = np.concatenate([counts, given])
    return Shares(rows, needs, counts, rest, num_others + long_places)


def _in_order(needs: Int32, budget: int) -> Int32:
    """As much of each need as is left when those before it have theirs."""
    left: Int32 = budget - (np.cumsum(needs, dtype=np.int32) - needs)
    counts: Int32 = np.clip(left, 0, needs)
    return counts
