"""How one batch is to be sampled: prepared when the batch changes, used in each of its steps."""

from dataclasses import dataclass

from torch import Tensor

from cardan.core.interfaces.random_stream import UInt64
from cardan.core.sampling.batch import BatchRows, LogitsEdit
from cardan.core.sampling.processors import ProcessorEdit
from cardan.core.types.step import Int64


@dataclass(frozen=True, slots=True)
class Draw:
    """Rows of the batch that are not greedy.

    ``places`` [R] and ``index`` (None: the whole batch) name them. ``streams`` [R] uint64 are
    their random streams. ``temperature``, ``top_k`` and ``shares`` are what ``choose_tokens``
    takes.
    """

    places: Int64
    index: Tensor | None
    streams: UInt64
    temperature: Tensor | None
    top_k: Tensor | None
    shares: Tensor | None


@dataclass(frozen=True, slots=True)
class LogprobsGroup:
    """Rows of the batch that want a table of the ``k`` likeliest tokens."""

    k: int
    rows: Int64
    index: Tensor | None


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """Everything about a batch that does not change from step to step.

    ``edits`` apply in order, before ``processors``. None and empty parts cost nothing. ``key`` are
    the bytes of the batch's rows, by which the plan of an unchanged batch is found.
    """

    batch: BatchRows
    key: bytes
    edits: tuple[LogitsEdit, ...]
    processors: ProcessorEdit | None
    draw: Draw | None
    logprobs: tuple[LogprobsGroup, ...]

    def record(self, token_ids: Tensor) -> None:
        """Take note of the sampled tokens [S]."""
        for edit in self.edits:
            edit.record(token_ids)
        if self.processors is not None:
            self.processors.record(token_ids)
