"""Experts' projections that a checkpoint stacks, seen expert by expert.

transformers keeps mixtures of experts as ``mlp.experts.gate_up_proj`` [E, 2 * I, H] and
``mlp.experts.down_proj`` [E, H, I], and can save them so; published checkpoints have
``mlp.experts.0.gate_proj.weight`` and its like.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

_STACK: Final = re.compile(r"(.+\.mlp\.experts)\.(gate_up_proj|down_proj)")


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """Rows ``[start, stop)`` of an expert in the tensor called ``stack``."""

    stack: str
    expert: int
    start: int
    stop: int


def stack_names(names: Iterable[str]) -> Iterator[str]:
    """Those that are stacks of experts."""
    return (name for name in names if _STACK.fullmatch(name))


def parts_of_stack(name: str, shape: tuple[int, ...]) -> dict[str, ExpertPart]:
    """The parts of a stack by the names that published checkpoints have for them.

    Empty if ``shape`` is not that of a stack.
    """
    found = _STACK.fullmatch(name)
    if found is None or len(shape) != 3 or 0 in shape:
        return {}
    prefix, rows = found[1], shape[1]
    if found[2] == "down_proj":
        spans = {"down_proj": (0, rows)}
    elif rows % 2:
        return {}
    else:
        spans = {"gate_proj": (0, rows // 2), "up_proj": (rows // 2, rows)}
    return {
        f"{prefix}.{expert}.{projection}.weight": ExpertPart(name, expert, *span)
        for expert in range(shape[0])
        for projection, span in spans.items()
    }
