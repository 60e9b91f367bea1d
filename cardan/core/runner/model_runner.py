"""Executes plans: rows in, tokens out. Knows tensors, not requests."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from cardan.core.interfaces.attention import AttentionBackend
from cardan.core.interfaces.device import Device, Event
from cardan.core.interfaces.errors import UnsupportedError
from cardan.core.interfaces.executor import TokenMask, WarmupReport
from cardan.core.interfaces.kernels import Kernel
from cardan.core.interfaces.memory import KVPool
from cardan.core.interfaces.model import CausalLM, LayerCache, StepContext
from cardan.core.runner.graphs import ForwardResult, GraphManager
from cardan.core.runner.request_states import RequestStates
from cardan.core.runner.step_buffers import StepBuffers, StepInputs
from cardan.core.runner.step_handle import DeviceStepHandle, StepResults
from cardan.core.runner.step_shapes import StepShape, StepShapes
from cardan.core.sampling.sampler import Sampler, SampleResult
from cardan.core.types.step import BlockCopies, LogprobsArrays, NewRow, SchedulerOutput

# Rows of logits made at once for prompt log-probabilities: bounds a [rows, vocab] float32 buffer.
_PROMPT_LOGITS_ROWS = 256

# Is shown the logits [n, vocab] that follow n consecutive prompt positions, before they become
# log-probabilities: the sequence's key, the first position, and the logits, which it only reads.
# Positions are shown again after a preemption.
PromptLogitsObserver = Callable[[int, int, torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class _ForwardPass:
    """What ``forward`` leaves for ``sample``: hidden states [T, hidden_size], or, if narrow,
    [R, hidden_size] of each row's last token; ``corrupt`` as ``ForwardResult`` has it."""

    hidden: torch.Tensor
    corrupt: torch.Tensor | None
    inputs: StepInputs
    is_narrow: bool


class ModelRunner:
    """Owner of the rows, block tables and step buffers of one model on one device.

    A step is two launches, ``forward`` and ``sample``, so that masks which depend on the newest
    token can be filled on the host in between.
    """

    def __init__(
        self,
        model: CausalLM,
        device: Device,
        states: RequestStates,
        sampler: Sampler,
        batch: StepBuffers,
        shapes: StepShapes,
        finite_rows: Kernel,
    ) -> None:
        self._model = model
        self._device = device
        self._states = states
        self._sampling = sampler.states
        self._sampler = sampler
        self._tables = batch.tables
        self._batch = batch
        self._shapes = shapes
        self._finite_rows = finite_rows
        self._graphs = GraphManager(device, lazy=shapes.is_lazy)
        self._has_events = True
        self._backends: Sequence[AttentionBackend] = ()
        self._pools: Sequence[KVPool] = ()
        self._layers: Sequence[LayerCache] = ()
        self._pass: _ForwardPass | None = None
        self._observer: PromptLogitsObserver | None = None

    def observe_prompt_logits(self, observer: PromptLogitsObserver | None) -> None:
        """Show ``observer`` the logits of all prompts whose log-probabilities are wanted."""
        self._observer = observer

    def bind_kv(
        self,
        backends: Sequence[AttentionBackend],
        pools: Sequence[KVPool],
        layers: Sequence[LayerCache],
    ) -> None:
        self._backends, self._pools, self._layers = backends, pools, layers

    @property
    def num_live_rows(self) -> int:
        return self._states.num_live

    @property
    def graphs(self) -> GraphManager:
        """The captured forward passes."""
        return self._graphs

    def capture(self) -> WarmupReport:
        """Capture the forward passes of the shapes that steps will have."""
        return self._graphs.capture(self._shapes.captured(), self._harmless)

    def graph_bytes(self) -> int:
        """About what ``capture`` will hold, bytes; captures a little and releases it."""
        return self._graphs.estimate(self._shapes.captured(), self._harmless)

    def close(self) -> None:
        """Release the graphs and the host's memory of steps. Idempotent."""
        self._graphs.close()
        self._batch.close()

    def forward(self, plan: SchedulerOutput) -> None:
        """Apply the plan's changes, then run the model over its tokens."""
        self._apply_changes(plan)
        if not len(plan.rows):
            self._pass = None
            return
        shape = self._shapes.of(plan)
        num_samples = int(plan.samples.sum())
        inputs = self._batch.gather(
            plan, self._states, shape, self._shapes.num_logit_rows(num_samples)
        )
        # All hidden states of a prompt are for its log-probabilities alone.
        can_narrow = self._narrows(shape)
        is_narrow = can_narrow and not self._gives_prompt_logprobs(plan)
        run = self._planned(inputs, is_narrow)
        # What was captured of such a shape is narrow.
        result = run() if can_narrow and not is_narrow else self._graphs.run(shape, run)
        self._pass = _ForwardPass(result.hidden, result.corrupt, inputs, is_narrow)

    def sample(self, plan: SchedulerOutput, mask: TokenMask | None) -> DeviceStepHandle:
        """Sample the rows that reached their last known token."""
        done, self._pass = self._pass, None
        if done is None:
            return DeviceStepHandle(StepResults())
        results = StepResults(
            num_rows=len(plan.rows),
            prompt_logprobs=self._prompt_logprobs(plan, done.hidden),
            sampled=self._sampled(plan, done, mask) if plan.samples.any() else None,
            corrupt=self._corrupt_rows(plan, done),
        )
        rooms = self._batch.rooms
        room = rooms.lend() if rooms is not None else None
        if room is not None:
            results.copy_to(room)
        event = self._event()
        self._batch.hold_until(event)
        return DeviceStepHandle(results, event, room, rooms)

    def _sampled(
        self,
        plan: SchedulerOutput,
        done: _ForwardPass,
        mask: TokenMask | None,
    ) -> SampleResult:
        """Tokens of the sampling rows, which the next step finds where it reads."""
        rows = plan.rows[plan.samples].astype(np.int64)
        places = done.inputs.logit_places
        if len(rows) == plan.num_tokens:
            # One token a row, all of them sample: the places are those of the rows.
            chosen = done.hidden[: len(places)]
        elif done.is_narrow:
            token_rows = done.inputs.views[0].token_rows
            chosen = done.hidden.index_select(0, token_rows.index_select(0, places))
        else:
            chosen = done.hidden.index_select(0, places)
        logits = self._model.compute_logits(chosen)
        if len(logits) > len(rows):
            logits = logits[: len(rows)]
        lengths = (plan.num_computed_tokens + plan.num_scheduled_tokens)[plan.samples]
        lengths = lengths.astype(np.int64)
        num_output = lengths - self._states.num_prompt_tokens[rows]
        sampled = self._sampler.sample(logits, rows, num_output, mask)
        self._states.append(done.inputs.append_places, sampled.token_ids)
        return sampled

    def _corrupt_rows(self, plan: SchedulerOutput, done: _ForwardPass) -> torch.Tensor | None:
        """[R] bool: rows with a token whose hidden state is not finite.

        Every token attends to itself, so bad keys or values of a token show in its own hidden
        state, and, where the model narrows, in that of the row's last token. None where each row
        computed one token and gives its logits: the sampler looks at those.
        """
        if done.corrupt is not None:
            # The next replay writes there, and results may be read after it began.
            return done.corrupt.clone()
        is_decode = len(plan.rows) == plan.num_tokens
        if is_decode and plan.samples.all():
            return None
        bad: torch.Tensor = ~self._finite_rows(done.hidden)
        if is_decode:
            return bad
        bad[plan.num_tokens :] = False
        view = done.inputs.views[0]
        counts = bad.new_zeros(view.num_rows, dtype=torch.int32)
        return counts.index_add_(0, view.token_rows, bad.to(torch.int32)) > 0

    def _harmless(self, shape: StepShape) -> Callable[[], ForwardResult]:
        return self._planned(self._batch.harmless(shape), self._narrows(shape))

    def _narrows(self, shape: StepShape) -> bool:
        """Whether the model may go on with fewer tokens than a step of the shape has."""
        return self._model.narrows and shape.num_rows < shape.num_tokens

    def _gives_prompt_logprobs(self, plan: SchedulerOutput) -> bool:
        """Whether the step predicts prompt tokens whose log-probabilities are wanted."""
        wanted = self._states.prompt_logprobs
        if not wanted:
            return False
        last = self._states.num_prompt_tokens[plan.rows] - 1
        return not wanted.keys().isdisjoint(plan.rows[plan.num_computed_tokens < last].tolist())

    def _planned(self, inputs: StepInputs, is_narrow: bool) -> Callable[[], ForwardResult]:
        """Plan attention for ``inputs``; returns what runs the model over them."""
        plans = [
            backend.plan(view) for backend, view in zip(self._backends, inputs.views, strict=True)
        ]
        step = StepContext(inputs.positions, self._layers, plans)
        view = inputs.views[0]

        def run() -> ForwardResult:
            # Made anew in each run, also of a graph: the starts differ from step to step.
            step.row_ends = view.query_start_loc[1:] - 1 if is_narrow else None
            hidden = self._model.forward(inputs.token_ids, step)
            return ForwardResult(hidden, ~self._finite_rows(hidden) if is_narrow else None)

        return run

    def _event(self) -> Event | None:
        """The end of a step; None where the device has no events, for it computes at once."""
        if self._has_events:
            try:
                return self._device.event()
            except UnsupportedError:
                self._has_events = False
        return None

    def _apply_changes(self, plan: SchedulerOutput) -> None:
        self._states.remove(plan.freed_rows)
        self._tables.remove(plan.freed_rows)
        self._sampling.remove(plan.freed_rows)
        self._add(plan.new_rows)
        self._tables.edit(plan.block_edits)
        for pool, copies in zip(self._pools, plan.block_copies, strict=True):
            self._copy(pool, copies)

    def _add(self, new_rows: Sequence[NewRow]) -> None:
        """Take up rows; all of them, whatever becomes of the step, for each is removed later."""
        failures: list[Exception] = []
        for row in new_rows:
            self._states.add(row)
            self._tables.add(row)
            try:
                self._sampling.add(row)
            except (RuntimeError, MemoryError) as error:  # histories find no memory
                failures.append(error)
        if failures:
            raise failures[0]

    def _copy(self, pool: KVPool, copies: BlockCopies) -> None:
        if len(copies.sources):
            pairs = np.stack([copies.sources, copies.targets], axis=1).astype(np.int64)
            device = self._states.token_ids.device
            on_device = torch.from_numpy(pairs).to(device, non_blocking=True)
            self._device.memory.copy_blocks(pool, pool, on_device)

    def _prompt_logprobs(
        self, plan: SchedulerOutput, hidden: torch.Tensor
    ) -> dict[int, LogprobsArrays]:
        """Tables of the rows that want them, over the prompt tokens this step predicts."""
        wanted = self._states.prompt_logprobs
        if not wanted:
            return {}
        starts = np.cumsum(plan.num_scheduled_tokens) - plan.num_scheduled_tokens
        found: dict[int, LogprobsArrays] = {}
        for place, row in enumerate(plan.rows.tolist()):
            if row not in wanted:
                continue
            first = int(plan.num_computed_tokens[place])
            last = first + int(plan.num_scheduled_tokens[place])
            last = min(last, int(self._states.num_prompt_tokens[row]) - 1)
            if last > first:
                start = int(starts[place])
                targets = self._states.token_ids[row, first + 1 : last + 1].to(torch.int64)
                part = hidden[start : start + last - first]
                show = partial(self._show, int(plan.keys[place]), first)
                found[row] = self._tables_of(part, targets, wanted[row], show)
        return found

    def _show(self, key: int, first: int, offset: int, logits: torch.Tensor) -> None:
        if self._observer is not None:
            self._observer(key, first + offset, logits)

    def _tables_of(
        self,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        k: int,
        show: Callable[[int, torch.Tensor], None],
    ) -> LogprobsArrays:
        """Tables over consecutive positions; ``show`` gets each part's offset and logits."""
        parts = []
        for offset in range(0, len(hidden), _PROMPT_LOGITS_ROWS):
            part = slice(offset, offset + _PROMPT_LOGITS_ROWS)
            logits = self._logits(hidden[part])
            show(offset, logits)
            parts.append(self._sampler.prompt_logprobs(logits, targets[part], k))
        return LogprobsArrays(
            token_ids=np.concatenate([part.token_ids for part in parts]),
            logprobs=np.concatenate([part.logprobs for part in parts]),
            ranks=np.concatenate([part.ranks for part in parts]),
        )

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of some positions; of ``_PROMPT_LOGITS_ROWS`` if shapes are strict."""
        if not self._shapes.policy.strict:
            return self._model.compute_logits(hidden)
        missing = _PROMPT_LOGITS_ROWS - len(hidden)
        padded = torch.nn.functional.pad(hidden, (0, 0, 0, missing))
        return self._model.compute_logits(padded)[: len(hidden)]
