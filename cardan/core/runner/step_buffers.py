"""The tensors of steps, which stay where they are."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cardan.core.interfaces.attention import BatchView
from cardan.core.interfaces.device import Event
from cardan.core.runner.block_tables import BlockTables
from cardan.core.runner.host_results import HostResults
from cardan.core.runner.request_states import RequestStates
from cardan.core.runner.step_shapes import StepShape
from cardan.core.types.step import SchedulerOutput

# Shapes whose views are kept: those that are captured, and as many others.
_MOST_VIEWS = 128
# Fields begin at multiples of this many elements, so that kernels know their alignment.
_ALIGNMENT = 16


@dataclass(slots=True)
class StepInputs:
    """One step's tensors; T tokens and R rows, padding included, and S samples.

    ``token_ids`` [T] int64 and ``positions`` [T] int64; ``views`` has one entry a KV group;
    ``logit_places`` int64: the token of each sampling row whose hidden state gives its logits;
    ``append_places`` [S] int64: where in ``RequestStates`` the sampled tokens go.
    """

    token_ids: Tensor
    positions: Tensor
    views: tuple[BatchView, ...]
    logit_places: Tensor
    append_places: Tensor


@dataclass(frozen=True, slots=True)
class HostLengths:
    """What the host knows of a step's rows, padding included."""

    query_lens: list[int]
    seq_lens: list[int]
    max_query_len: int
    max_seq_len: int


@dataclass(frozen=True, slots=True)
class _ShapeViews:
    """The parts of the buffers that steps of one shape use; slots and tables by group."""

    token_ids: Tensor
    positions: Tensor
    token_rows: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    slots: tuple[Tensor, ...]
    tables: tuple[Tensor, ...]


class StepBuffers(ABC):
    """Owner of the step buffers, sized for the largest step.

    Steps of one shape have their tensors at the same addresses, where captured graphs read them.
    The fields are laid out as ``step_inputs`` fills them.

    Attributes:
        rooms: where the results of steps are copied to; None where they lie in the host's memory.
    """

    rooms: HostResults | None = None

    def __init__(
        self,
        max_num_tokens: int,
        max_num_rows: int,
        tables: BlockTables,
        block_size: int,
        device: torch.device,
    ) -> None:
        """The largest step is given with its padding."""
        self.tables = tables
        self._block_size = block_size
        num_groups = tables.num_groups
        self._num_columns = _aligned(max_num_rows + 1)

        def buffer(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self._token_fields = buffer(3 + num_groups, _aligned(max_num_tokens))
        self._row_fields = buffer(4, self._num_columns)
        # Tables of any width lie at the start of a group's, without gaps.
        num_entries = _aligned(max_num_rows * tables.max_blocks)
        self._step_tables = buffer(num_groups, num_entries, dtype=torch.int32)
        self._shape_views: dict[StepShape, _ShapeViews] = {}
        self._sample_views: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    @abstractmethod
    def gather(
        self, plan: SchedulerOutput, states: RequestStates, shape: StepShape, num_logit_rows: int
    ) -> StepInputs:
        """Fill the buffers for ``plan``; nothing waits for the device.

        ``num_logit_rows``: length of ``logit_places``; those past the samples repeat token 0.
        """

    @abstractmethod
    def hold_until(self, event: Event | None) -> None:
        """``event`` ends the step that was gathered last; None: the device computed at once."""

    @abstractmethod
    def close(self) -> None:
        """Give host memory back; no step may be in flight. Idempotent."""

    def harmless(self, shape: StepShape) -> StepInputs:
        """Fill the buffers with a step of ``shape`` that reads the null block and writes nowhere.

        Each row has one token, as far as there are tokens; what the host knows of lengths is the
        most that a step of this shape can have.
        """
        views = self._views(shape)
        num_rows = min(shape.num_rows, shape.num_tokens)
        place = np.arange(max(shape.num_rows + 1, shape.num_tokens), dtype=np.int64)
        ones = (place[: shape.num_rows] < num_rows).astype(np.int64)
        token_rows = place[: shape.num_tokens]
        views.query_start_loc.copy_(
            torch.from_numpy(np.minimum(place[: shape.num_rows + 1], num_rows))
        )
        views.seq_lens.copy_(torch.from_numpy(ones))
        views.token_rows.copy_(torch.from_numpy(np.where(token_rows < num_rows, token_rows, 0)))
        for tensor in (views.token_ids, views.positions, *views.tables):
            tensor.zero_()
        for slots in views.slots:
            slots.fill_(-1)
        lens = ones.tolist()
        most_queries = 1 if shape.is_decode else shape.num_tokens
        lengths = HostLengths(lens, lens, most_queries, shape.num_blocks * self._block_size)
        return self._inputs(shape, lengths, (0, 0))

    def _inputs(
        self, shape: StepShape, lengths: HostLengths, num_samples: tuple[int, int]
    ) -> StepInputs:
        """The tensors of a step; ``num_samples`` without and with padding."""
        views = self._views(shape)
        groups = tuple(
            [
                BatchView(
                    query_lens=lengths.query_lens,
                    seq_lens_host=lengths.seq_lens,
                    query_start_loc=views.query_start_loc,
                    seq_lens=views.seq_lens,
                    positions=views.positions,
                    token_rows=views.token_rows,
                    slot_mapping=slots,
                    block_table=table,
                    max_query_len=lengths.max_query_len,
                    max_seq_len=lengths.max_seq_len,
                )
                for slots, table in zip(views.slots, views.tables, strict=True)
            ]
        )
        return StepInputs(views.token_ids, views.positions, groups, *self._samples(num_samples))

    def _views(self, shape: StepShape) -> _ShapeViews:
        views = self._shape_views.get(shape)
        if views is None:
            if len(self._shape_views) == _MOST_VIEWS:
                self._shape_views.clear()
            views = self._shape_views[shape] = self._new_views(shape)
        return views

    def _new_views(self, shape: StepShape) -> _ShapeViews:
        token_ids, positions, token_rows, *slots = self._token_fields[:, : shape.num_tokens]
        num_entries = shape.num_rows * shape.num_blocks
        return _ShapeViews(
            token_ids=token_ids,
            positions=positions,
            token_rows=token_rows,
            query_start_loc=self._row_fields[0, : shape.num_rows + 1],
            seq_lens=self._row_fields[1, : shape.num_rows],
            slots=tuple(slots),
            tables=tuple(
                table[:num_entries].view(shape.num_rows, shape.num_blocks)
                for table in self._step_tables
            ),
        )

    def _samples(self, num_samples: tuple[int, int]) -> tuple[Tensor, Tensor]:
        views = self._sample_views.get(num_samples)
        if views is None:
            if len(self._sample_views) == _MOST_VIEWS:
                self._sample_views.clear()
            samples, padded = num_samples
            views = self._row_fields[2, :padded], self._row_fields[3, :samples]
            self._sample_views[num_samples] = views
        return views


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
