"""Random steps for ``step_inputs``."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cardan.core.interfaces.kernels import Case
from cardan.core.ops.packed_step import PackedStep, StepSizes, first_staged_word

_NUM_ROWS, _MAX_LEN, _BLOCK_SIZE = 9, 60, 4
_STAGED_WORDS = 400
# Fields are as long as the padded rows of the largest step, and one more.
_COLUMNS = 13


@dataclass(frozen=True, slots=True)
class _Kind:
    """Rows of a step and how many of them are new; tokens a row at most; groups; padding."""

    num_rows: int
    num_new: int
    most_tokens: int
    num_groups: int
    padding: int


_KINDS = (
    _Kind(num_rows=5, num_new=0, most_tokens=1, num_groups=1, padding=3),
    _Kind(num_rows=7, num_new=3, most_tokens=20, num_groups=2, padding=2),
    _Kind(num_rows=1, num_new=1, most_tokens=40, num_groups=1, padding=0),
    _Kind(num_rows=4, num_new=1, most_tokens=3, num_groups=3, padding=1),
)


def make_step_inputs(dtype: Any, device: Any, seed: int) -> Sequence[Case]:
    """A decode step, steps with new rows, and one with more groups; all tensors hold integers."""
    rng = np.random.default_rng(seed)
    return [_case(kind, rng, dtype, device) for kind in _KINDS]


def _case(kind: _Kind, rng: np.random.Generator, dtype: Any, device: Any) -> Case:
    num_groups, max_blocks = kind.num_groups, _MAX_LEN // _BLOCK_SIZE
    counts = rng.integers(1, kind.most_tokens + 1, kind.num_rows)
    computed = rng.integers(0, _MAX_LEN - counts)
    num_words = first_staged_word(num_groups, _COLUMNS) + _STAGED_WORDS
    words = rng.integers(0, 2**31 - 1, num_words, np.int32)
    step = PackedStep(words, num_groups, _COLUMNS)
    samples = np.flatnonzero(rng.random(kind.num_rows) < 0.7)
    part = slice(0, kind.num_rows)
    step.rows[part] = rng.permutation(_NUM_ROWS)[part]
    step.starts[0] = 0
    step.starts[1 : kind.num_rows + 1] = np.cumsum(counts)
    step.computed[part] = computed
    step.samples[: len(samples)] = samples
    step.fresh_counts[part] = 0
    step.fresh_counts[: kind.num_new] = (computed + counts)[: kind.num_new]
    blocks = -(-(computed + counts) // _BLOCK_SIZE)
    step.block_first[:, part] = rng.integers(0, blocks, (num_groups, kind.num_rows))
    step.block_end[:, part] = rng.integers(step.block_first[:, part], blocks + 1)
    step.staged[:] = rng.integers(1, 999, _STAGED_WORDS)
    _stage(step, kind.num_rows)

    def table(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.integers(1, 999, shape, np.int32)).to(device)

    sizes = StepSizes(
        rows=kind.num_rows,
        tokens=int(counts.sum()),
        samples=len(samples),
        padded_rows=kind.num_rows + kind.padding,
        padded_tokens=int(counts.sum()) + kind.padding,
        num_blocks=max_blocks,
        block_size=_BLOCK_SIZE,
        new_tokens=int(step.fresh_counts[part].sum()),
        new_blocks=int((step.block_end - step.block_first)[:, part].sum()),
    )
    args = (
        torch.from_numpy(words).to(device),
        table(_NUM_ROWS, _MAX_LEN),
        table(num_groups, _NUM_ROWS, max_blocks),
        table(3 + num_groups, sizes.padded_tokens + 5).to(torch.int64),
        table(4, _COLUMNS).to(torch.int64),
        table(num_groups, _COLUMNS * max_blocks),
        sizes,
    )
    return Case(args, {"dtype": str(dtype).removeprefix("torch.")})


def _stage(step: PackedStep, num_rows: int) -> None:
    """Give all that comes with the step words of its own."""
    at = step.staged_at
    spans = [(step.fresh_counts, step.fresh_offsets)]
    spans += zip(step.block_end - step.block_first, step.block_offsets, strict=True)
    for lengths, offsets in spans:
        for place in range(num_rows):
            offsets[place] = at
            at += int(lengths[place])
